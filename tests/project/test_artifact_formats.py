"""JSON of our own is checked whenever it is read: the plain ways are for other packages' files."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "workflow"
# Files of models, adapters and tokenizers, and the shapes that the sources ship.
OTHERS_FORMATS = {
    "read_json": {
        "lib/data/reading/hub_download.py",
        "lib/model/architecture/model_shape.py",
        "lib/model/architecture/shipped_shapes.py",
        "lib/planning/preflight/what_if.py",
        "lib/system/checksums.py",  # the record of a download, which may be a file of the user
        "lib/system/files.py",
        "scripts/write_card.py",  # adapter_config.json, held against SHA256SUMS
        "scripts/write_model_descriptions.py",
    },
    "write_json": {
        "benchmark/random_base.py",
        "lib/export/adapter_files.py",
        "lib/export/conversions.py",
        "lib/export/extended_model.py",
        "lib/export/gguf_files.py",
        "lib/export/trial.py",
        "lib/quantization/nf4_checkpoint.py",
        "lib/system/files.py",
        "scripts/quantize_base.py",
    },
}


@pytest.mark.parametrize("function", OTHERS_FORMATS)
def test_plain_json_is_only_for_files_of_other_packages(function):
    calling = {
        path.relative_to(ROOT).as_posix()
        for path in ROOT.rglob("*.py")
        if re.search(rf"files import[^)]*?\b{function}\b|\bdef {function}\(path: Path, value|"
                     rf"\bdef {function}\(path: Path\)", path.read_text(encoding="utf-8"))
    }  # fmt: skip
    assert calling == OTHERS_FORMATS[function]
