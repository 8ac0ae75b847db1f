"""Removal of passwords and tokens from text that is shown or kept: messages, logs.

Secrets belong into the environment (`HF_TOKEN`), but a library's message may quote one.
`detect-secrets` knows services' tokens (by form, not by entropy). This module adds logins of URLs,
values of `access_token=` and the like, tokens of the hub and of Google."""

import functools
import re
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

MASK = "***"
SHORTEST = 8  # characters; a shorter value is an ordinary word
# A login's password may hold any character: all up to the word's last @ counts. Repetitions that
# may start anywhere are bounded: a text may be made to be slow.
LOGIN = r"(?<=://)(?:[^/\s@:]{0,64}:\S{0,256}|[^/\s@'\"]{1,256})(?=@)"
NAMED = (
    r"(?:access|refresh|auth|id|security)[_-]?token|api[_-]?key|secret[_-]?access[_-]?key"
    r"|client[_-]?secret|account[_-]?key|\w{0,32}(?:password|passwd|pwd)|X-(?:Amz|Goog)-[A-Za-z-]+"
)
IN_QUERY = r"(?<=[?&])(?:token|sig|signature|secret|key)="
SECRET_TEXT = re.compile(
    rf"{LOGIN}"
    rf"|(?:{IN_QUERY}|(?<![A-Za-z-])(?:{NAMED})(?:=['\"]?|['\"]\s*[:=]\s*['\"]))(?P<value>[^&\s'\"]+)"
    r"|\bBearer +(?P<bearer>[\w.~+/=-]{8,})"
    r"|\bAuthorization['\"]?\s*[:=]\s*['\"]?\w+ +(?P<authorization>[\w.~+/=-]+)"
    r"|\bBasic +(?P<basic>(?=[\w+/]*[\d=])[\w+/=]{8,})"
    r"|\bhf_[A-Za-z0-9]{20,}|\bapi_org_[A-Za-z0-9]{20,}"  # huggingface.co/docs/hub/security-tokens
    r"|\bAIza[\w-]{35}|\bya29\.[\w-]{20,}|\bgithub_pat_\w{20,}"
    r"|(?<=://)hooks\.[^\s'\"]+|(?<=://)[^\s'\"]{1,200}webhook[^\s'\"]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY[A-Z ]*-----.*?(?:-----END[A-Z ]*-----|\Z)",
    re.IGNORECASE | re.DOTALL,
)
# Tokens of services whose forms detect-secrets 1.5 does not have: by prefix, or a short prefix and
# an unbroken random text of both cases with digits. Each begins where a word does, and nothing is
# read twice: a text may be made to be slow.
PREFIXED_TOKEN = re.compile(
    r"(?<![\w-])(?:[sprg]k|nvapi|xai|pplx|r8|gsk|npm|rpa|wandb_v1|tgp_v1)[-_][\w-]{24,}+"
    r"|(?<![\w-])(?:dapi|do[opr]_v1_|KGAT_|key-|ghs_|pul-)[0-9a-f]{32,}+"
    r"|(?<![\w-])(?:[A-Za-z][A-Za-z0-9]{1,11}[-_]){1,3}"
    r"(?=(?:[A-Za-z]*+\d){3})(?=[A-Z0-9]*+[a-z])(?=[a-z0-9]*+[A-Z])[A-Za-z0-9]{28,}+(?![\w-])"
    r"|(?<![\w-])eyJ[\w-]{8,}+\.[\w-]*+(?:\.[\w-]*+)?"  # JSON web tokens, RFC 7519
)
WORD = re.compile(r"[^\s'\"]{20,}")  # the length of the shortest token in the list
# Words of names of variables that hold secrets: HF_TOKEN, API_KEY_2, PGPASSWORD, CI_PAT, ...
SECRET_NAME = re.compile(
    r"(?:^|_)(?:TOKENS?|SECRETS?|KEYS?|AUTH|PAT|PASS|PWD|CREDS?|CREDENTIALS?|COOKIES?|JWT|SAS|DSN"
    r"|BEARER|SESSION|CONNECTION_STRING|(?:DATABASE|DB|REDIS|MONGO\w*|POSTGRES\w*)_UR[LI])\d*(?:_|$)"
    r"|(?:TOKEN|PASSWORD|PASSWD|SECRET|APIKEY|PASSPHRASE|WEBHOOK)\d*(?:_|$)|[A-Z]PASS$",
    re.IGNORECASE,
)
NO_SECRET_NAME = re.compile(r"^(?:OLD)?PWD$|(?:^|_)(?:FILE|PATH|DIR|SOCK)$", re.IGNORECASE)


# Modules of `detect_secrets.plugins`.
SERVICES = (
    *("aws", "azure_storage_key", "discord", "github_token", "gitlab_token", "mailchimp"),
    *("openai", "pypi_token", "sendgrid", "slack", "square_oauth", "stripe", "telegram_token"),
    "twilio",
)


@functools.cache
def token_forms() -> re.Pattern[str]:
    """Return the pattern of services' tokens, by their own forms. The package is imported when the
    first text may hold one: that takes a fifth of a second."""
    from detect_secrets.plugins.base import RegexBasedDetector

    modules = [import_module(f"detect_secrets.plugins.{name}") for name in SERVICES]
    detectors: list[Any] = [
        plugin
        for module in modules
        for plugin in vars(module).values()
        if isinstance(plugin, type) and issubclass(plugin, RegexBasedDetector)
        if plugin.__module__ == module.__name__
    ]
    # Without those that search for a name before the token.
    patterns = [
        form.pattern
        for detector in detectors
        for form in detector.denylist
        if not form.pattern.startswith("aws.")
    ]
    return re.compile(rf"(?:{'|'.join(patterns)})[\w.=-]*")


def redacted(text: str, *, secrets: Iterable[str] = ()) -> str:
    """Return `text` with logins of URLs, tokens and the given `secrets` replaced by `***`."""
    for secret in secrets:
        for form in (secret, quote(secret, safe="")):
            text = text.replace(form, MASK)
    text = PREFIXED_TOKEN.sub(MASK, SECRET_TEXT.sub(_masked, text))
    return WORD.sub(lambda word: token_forms().sub(MASK, word[0]), text)


def _masked(match: re.Match[str]) -> str:
    secret = next(filter(None, match.groups()), match[0])
    return match[0].removesuffix(secret) + MASK


def holds_secret(text: str) -> bool:
    return redacted(text) != text


def secret_values(environment: Mapping[str, str]) -> list[str]:
    """Return the values of variables that are named like secrets, longest first."""
    values = {
        value
        for name, value in environment.items()
        if len(value) >= SHORTEST and SECRET_NAME.search(name) and not NO_SECRET_NAME.search(name)
    }
    return sorted(values, key=len, reverse=True)


def public_name(path: str) -> str:
    """Return a path as in the settings; of an absolute one (this machine's) the last part."""
    return PurePath(path).name if PurePath(path).is_absolute() else path
