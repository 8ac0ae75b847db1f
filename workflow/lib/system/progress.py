"""Progress of a long piece of work: a bar on a terminal, elsewhere a line in the log every half
minute, even without progress."""

import logging
import sys
import threading
import time
from typing import Self

from tqdm import tqdm

from workflow.lib.system.number_formats import duration

logger = logging.getLogger("workflow")
LINE_S = 30.0


class Progress:
    """Counts finished ones of `total` things (None: unknown), shown by a bar or lines in the block.
    total_work: cost of all, in any unit, for the remaining time."""

    def __init__(
        self,
        what: str,
        *,
        total: int | None,
        unit: str,
        total_work: float | None = None,
        line_s: float = LINE_S,
    ) -> None:
        self._what, self._total, self._unit, self._line_s = what, total, unit, line_s
        self._total_work = float(total or 0) if total_work is None else total_work
        self._done, self._done_work, self._tokens = 0, 0.0, 0
        self._bar = tqdm(total=total, desc=what, unit=unit, disable=None, file=sys.stderr)
        self._began = time.monotonic()
        self._over = threading.Event()
        self._lines = threading.Thread(target=self._log, name="progress", daemon=True)

    def __enter__(self) -> Self:
        if self._bar.disable:
            self._lines.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._bar.disable:
            self._lines.join()
        self._bar.close()

    def add(self, count: int, *, work: float | None = None, tokens: int = 0) -> None:
        """Count finished items. work: their cost in the unit of `total_work`; None: one each.
        tokens: of the items, for the tokens per second."""
        self._bar.update(count)
        self._tokens += tokens
        if self._tokens:
            self._bar.set_postfix_str(
                f"{self._tokens / (time.monotonic() - self._began):,.0f} tokens/s"
            )
        self._done += count
        self._done_work += count if work is None else work

    def line(self, elapsed_s: float) -> str:
        """Return the progress in words, with the remaining time if it can be estimated."""
        total = "" if self._total is None else f" of {self._total}"
        passed = f"{self._what}: {self._done}{total} {self._unit} in {duration(elapsed_s)}"
        if self._tokens:
            passed += f" ({self._tokens / max(elapsed_s, 1e-9):,.0f} tokens/s)"
        if self._total is None:
            return passed
        if not self._done_work:
            return f"{passed}; the time left is not known yet"
        left_s = elapsed_s * max(0.0, self._total_work / self._done_work - 1)
        return f"{passed}, about {duration(left_s)} left"

    def _log(self) -> None:
        while not self._over.wait(self._line_s):
            logger.info("%s", self.line(time.monotonic() - self._began))
