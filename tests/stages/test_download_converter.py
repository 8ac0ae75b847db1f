"""The stage that downloads llama.cpp's converters: of one release, whole, or none."""

import argparse
import json
import subprocess
import sys
import tarfile

import pytest

from tests.project.test_envs import pins
from tests.support.llama_cpp_model import converters
from workflow.lib.settings.evaluate import (
    ADAPTER_CONVERTER,
    CONVERTER,
    LLAMA_CPP_RELEASE,
    LLAMA_CPP_SHA256,
)
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import file_sha256
from workflow.scripts.download_converter import main

INSIDE = "xllamacpp-1.0/thirdparty/llama.cpp"


def test_converters_are_of_the_release_that_checks_their_files():
    assert pins()["xllamacpp"] == LLAMA_CPP_RELEASE


def test_downloaded_converters_run():
    folder = converters()
    for script in (CONVERTER, ADAPTER_CONVERTER):
        done = subprocess.run(
            [sys.executable, folder / script, "--help"], capture_output=True, text=True, check=False
        )
        assert "--outtype" in done.stdout, done.stderr


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes packages from, and from nowhere else; it holds `xllamacpp` 1.0."""
    source = tmp_path / "source" / INSIDE
    source.mkdir(parents=True)
    (source / CONVERTER).write_text("converter")
    (source / "main.cpp").write_text("not taken")
    (tmp_path / "source/xllamacpp-1.0/setup.py").write_text(
        "from setuptools import setup; setup(name='xllamacpp', version='1.0')"
    )
    folder = tmp_path / "index"
    folder.mkdir()
    with tarfile.open(folder / "xllamacpp-1.0.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "source/xllamacpp-1.0", "xllamacpp-1.0")
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_BUILD_ISOLATION": "0",  # pip reads it as it is called: no isolation
    }.items():
        monkeypatch.setenv(name, value)
    return folder


def download(output, *, release="1.0", sha256):
    config = json.loads(json.dumps({"release": release, "sha256": sha256}))
    main(argparse.Namespace(config=config, output=output))


def test_only_the_converters_are_taken(index, tmp_path):
    output = tmp_path / "llama_cpp" / "1.0"
    download(output, sha256=file_sha256(index / "xllamacpp-1.0.tar.gz"))
    assert [path.name for path in output.iterdir()] == [CONVERTER]
    assert [path.name for path in output.parent.iterdir()] == ["1.0"]


def test_another_file_of_the_same_name_is_refused(index, tmp_path):
    with pytest.raises(UserError, match=f"and must have {LLAMA_CPP_SHA256}"):
        download(tmp_path / "llama_cpp", sha256=LLAMA_CPP_SHA256)
    assert not (tmp_path / "llama_cpp").exists()


def test_index_without_it_is_told_with_pips_last_words(index, tmp_path):
    with pytest.raises(UserError, match=r"xllamacpp==2\.0.*\n.*No matching.*\nRun this stage"):
        download(tmp_path / "llama_cpp", release="2.0", sha256="")
