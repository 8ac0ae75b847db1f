"""Which jobs a failed one ends."""

import signal
import subprocess
import sys

from workflow.lib.system.interrupts import end_stages

WAIT = "import signal; print(flush=True); signal.pause()"


def start(stage: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WAIT, f"workflow.scripts.{stage}", "--log", "quantize_base"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    process.stdout.readline()  # it waits
    return process


def test_stages_are_ended_by_their_name_and_no_others():
    with start("quantize_base") as ended, start("finetune") as other:
        assert end_stages(["tokenize_dataset", "quantize_base"])
        assert not end_stages(["tokenize_dataset"])
        assert ended.wait() == -signal.SIGTERM
        assert other.poll() is None
        other.kill()
