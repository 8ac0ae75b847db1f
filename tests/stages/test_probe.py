"""The probe of a CPU, from the command line."""

from tests.support.forked_stage import forked_stage
from workflow.lib.artifacts.read_records import read_record
from workflow.lib.planning.probes import Probe, cpu_name
from workflow.lib.planning.timing.rates import PROBED_CPU


def test_probe_of_a_cpu_writes_what_is_held_against_the_table(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = forked_stage("probe", "--cpu", processes=1, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "nothing was sent" in done.stderr
    (file,) = tmp_path.iterdir()
    probe = read_record(file, Probe)
    assert probe.device == cpu_name(1)
    assert file.name == probe.file_name
    assert probe.measured.keys() == PROBED_CPU.keys()


def test_number_of_processes_below_one_is_refused(tmp_path):
    done = forked_stage("probe", "--cpu", processes=0, folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("--processes = 0: must be at least 1")
