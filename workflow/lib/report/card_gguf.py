"""The section GGUF of a model card: which files there are, how llama.cpp compares with Transformers
on them, and the commands that serve them.
"""

from workflow.lib.artifacts.gguf_record import GgufChecks, GgufFile
from workflow.lib.report.card_inputs import code
from workflow.lib.system.number_formats import count, general, loss, share, signed, size, visible

MEANING = (
    "Each file was run by llama.cpp on the CPU, beside the same model in Transformers: the loss of "
    "held-out tokens (nats per token) and what is allowed, the share of them with the same most "
    "likely token, and greedy answers that are equal token by token. The token ids of prompts are "
    "the same in both. The tokens are too few to compare formats."
)


def gguf_section(checks: GgufChecks) -> str:
    """Return the commands and the table of what was checked."""
    head = "| file | size | llama.cpp | Transformers | difference | same token | equal answers |\n"
    rows = "".join(f"| {' | '.join(_row(file))} |\n" for file in checks.files)
    commands = "".join(f"{_command(file)}\n" for file in _firsts(checks))
    return f"```bash\n{commands}```\n\n{head}|{'---|' * 7}\n{rows}\n{MEANING}\n"


def _firsts(checks: GgufChecks) -> list[GgufFile]:
    """Return the first file of each form."""
    firsts: dict[str, GgufFile] = {}
    for file in checks.files:
        firsts.setdefault(file.form, file)
    return list(firsts.values())


def _command(file: GgufFile) -> str:
    adapter = f" --lora {visible(file.adapter)}" if file.adapter else ""
    return f"llama-server -m {visible(file.file)}{adapter} --jinja"


def _row(file: GgufFile) -> list[str]:
    name = code(file.file) + (f" with {code(file.adapter)}" if file.adapter else "")
    return [
        name,
        size(file.bytes + (file.adapter_bytes or 0)),
        loss(file.loss),
        loss(file.reference_loss),
        f"{signed(file.loss - file.reference_loss)} (at most {general(file.bound)})",
        f"{share(file.same_most_likely)} of {count(file.positions)}",
        f"{count(file.equal_answers)} of {count(file.answers)}",
    ]
