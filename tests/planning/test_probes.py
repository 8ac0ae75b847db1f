"""Files of probes."""

import pytest

from tests.support.probes import probe
from workflow.lib.planning.probes import cpu_name, read_probes
from workflow.lib.system.errors import UserError
from workflow.lib.system.files import write_checked_json

FOUND = probe("NVIDIA New", {"matmul": 1e12}, 1.0)


def written(folder, found):
    write_checked_json(folder / found.file_name, found.as_json())


def test_last_probe_of_a_device_counts_whatever_its_driver(tmp_path):
    assert read_probes(tmp_path / "missing") == {}
    later = probe("NVIDIA New", {"matmul": 2e12}, 1.0, created_utc="2026-12-01T00:00:00Z")
    later = later.model_copy(update={"driver": "0"})
    written(tmp_path, FOUND)
    written(tmp_path, later)
    assert len([*tmp_path.iterdir()]) == 2
    assert read_probes(tmp_path) == {"NVIDIA New": later}


@pytest.mark.parametrize(
    "change", [{"measured": {"matmul": {"value": 0.0, "spread": 0.0}}}, {"device": None}]
)
def test_file_that_is_no_probe_is_named(tmp_path, change):
    write_checked_json(tmp_path / "p.json", FOUND.as_json() | change)
    with pytest.raises(UserError, match=r"p\.json: .*probe again"):
        read_probes(tmp_path)


def test_name_of_a_cpu_tells_the_threads_of_each_process(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert cpu_name(2).endswith(", 2 threads a process")
    assert cpu_name(8).endswith(", 1 threads a process")
