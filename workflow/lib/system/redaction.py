"""Passwords and tokens taken out of text that is shown or kept: messages, logs.

Secrets belong into the environment (`HF_TOKEN`), never into settings; but a library's message may
quote one.
"""

import re
from collections.abc import Iterable, Mapping

MASK = "***"
# The login in a URL, the hub's access tokens (https://huggingface.co/docs/hub/security-tokens),
# what signs a URL of object storage for a while, and what a request is authorized by.
SECRET_TEXT = re.compile(
    r"(?<=://)[^/\s@'\"]+(?=@)|\bhf_[A-Za-z0-9]{20,}"
    r"|(?<=[?&]sig=)[^&\s'\"]+|(?<=[?&]token=)[^&\s'\"]+|(?<=[?&]Signature=)[^&\s'\"]+"
    r"|(?<=[?&]X-Amz-Signature=)[^&\s'\"]+|(?<=[?&]X-Amz-Security-Token=)[^&\s'\"]+"
    r"|(?<=[Bb]earer )[\w.~+/=-]{8,}"
)
# Names of variables that hold secrets: HF_TOKEN, WANDB_API_KEY, AWS_SECRET_ACCESS_KEY, ...
SECRET_NAME = re.compile(
    r"(^|_)(TOKEN|(API)?KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS)$", re.IGNORECASE
)
SHORTEST = 8  # characters; a shorter value is a word that occurs by itself


def redacted(text: str, *, secrets: Iterable[str] = ()) -> str:
    """Return `text` with logins of URLs, hub tokens and the given `secrets` replaced by `***`."""
    for secret in secrets:
        text = text.replace(secret, MASK)
    return SECRET_TEXT.sub(MASK, text)


def holds_secret(text: str) -> bool:
    """Tell whether `text` has a login in a URL, or a hub token."""
    return SECRET_TEXT.search(text) is not None


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """Return the values of variables that are named like secrets, longest first."""
    values = {v for k, v in environment.items() if SECRET_NAME.search(k) and len(v) >= SHORTEST}
    return sorted(values, key=len, reverse=True)
