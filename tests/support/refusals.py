"""What users are told where something cannot be done."""

from collections.abc import Callable
from typing import Any

import pytest

from workflow.lib.system.errors import UserError


def refusal(call: Callable[..., Any], *args: Any, **options: Any) -> str:
    """Call what must raise `UserError`; return its message."""
    with pytest.raises(UserError) as caught:
        call(*args, **options)
    return str(caught.value)
