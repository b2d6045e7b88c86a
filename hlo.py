"""What is in a program that XLA has compiled: what it sends to other devices, and what it reads and writes.

Programs are read as HLO, XLA's own language, of which each line is an instruction: `compiled.as_text()`.  plan.py asks
for a TPU's programs, and the tests for those that run on fake devices.
"""

import math
import re

BYTES = dict(f32=4, bf16=2, s32=4, u32=4, f16=2, s16=2, u16=2, s8=1, u8=1, pred=1)
COLLECTIVES = "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"
NO_TRAFFIC = "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "after-all", "opt-barrier"


def array_sizes(shapes: str) -> list[tuple[int, bool]]:
    """(bytes, in HBM?) of each array in e.g. `(f32[8,128]{1,0:T(8,128)S(1)}, s32[])`; S(1) and up are on the chip."""
    found = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\](\{[^}]*\})?", shapes)
    return [
        (BYTES[d] * math.prod(int(n) for n in dims.split(",") if n), "S(" not in at)
        for d, dims, at in found
        if d in BYTES
    ]


def read_program(text: str):
    """(bytes to and from HBM, {collective: (count, bytes)}) of one device in one run of a compiled program.

    text: the program as HLO, XLA's language, one line an instruction.  A loop counts as often as its condition says,
    from zero in steps of one.  What a fusion does inside stays on the chip: only its operands and results move.  The
    bytes of a collective are those of its whole array: what is gathered, what is added up.
    """
    computations, entry, collectives = {}, "", {}
    for block in re.split(r"\n(?=\S)", text):
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) \(", block):
            line = r"\s+(?:ROOT )?%([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*)"
            found = [re.match(line, text) for text in block.split("\n")[1:]]
            computations[head.group(2)] = [match.groups() for match in found if match]
            entry = head.group(2) if head.group(1) else entry

    def walk(name: str, times: int, fused: bool = False) -> int:
        """Bytes to and from HBM; adds what is sent to `collectives`."""
        results, traffic = {}, 0
        for result, shapes, op, rest in computations[name]:
            results[result] = shapes
            sizes, kind = array_sizes(shapes), op.removesuffix("-start")
            operands = re.findall(r"%([\w.\-]+)", rest.split("), ")[0])
            read = [size for operand in operands for size in array_sizes(results.get(operand, ""))]
            if kind in COLLECTIVES:
                # The larger side; a gather that starts has the operand among its results.
                moved = max(sum(size for size, _ in read), 0 if op != kind else sum(size for size, _ in sizes))
                if op == "all-gather-start":
                    moved = sizes[-1][0]
                if name.startswith("all-reduce-scatter"):  # a TPU's way to say so
                    kind = "reduce-scatter"
                count, before = collectives.get(kind, (0, 0))
                collectives[kind] = count + times, before + times * moved
            if op == "while":
                condition, body = (re.search(rf"{part}=%([\w.\-]+)", rest).group(1) for part in ("condition", "body"))
                bounds = [rest for _, _, op, rest in computations[condition] if op == "constant"]
                traffic += walk(body, times * int(bounds[0].split(")")[0]), fused)
                continue
            # What works in the background is three fusions with the same collective: begin, meanwhile, done.
            called = re.search(r"calls=%([\w.\-]+)", rest)
            if called and not called.group(1).startswith("async_collective") and "collective-done" not in result:
                walk(called.group(1), times, fused=True)
            if fused or op in NO_TRAFFIC or op.endswith("-done"):
                continue
            if op in ("copy-start", "slice-start"):  # from HBM to the chip or back
                traffic += times * sizes[1][0]
            else:
                traffic += times * sum(size for size, in_hbm in sizes + read if in_hbm)
        return traffic

    return walk(entry, 1), collectives
