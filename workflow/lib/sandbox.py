"""Templates of evaluation tasks, which may come from anywhere, rendered where they can reach nothing.

The harness renders `doc_to_text` and its like in a plain Jinja environment, in which a template can walk from any
string to the interpreter. In Jinja's sandbox it cannot: private attributes are refused, objects cannot be
changed, and a range has at most 100,000 numbers. A template may still loop for ever inside loops.
The harness's environment is a variable of its module `utils`, which its one function for templates reads; neither it nor
a task takes another (lm_eval 0.4.13). Functions in place of templates, which it takes for most fields of a task, it does not take
for `gen_prefix` and for few-shot examples. So the variable is set, once, in a process that does nothing but evaluate.
Chat templates need nothing here: Transformers renders them in this sandbox itself.
"""

from typing import Any

from jinja2 import Environment, StrictUndefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval import utils


def sandbox_task_templates() -> None:
    """Let the harness render its templates in a sandbox with the same filters; it has no option for that."""
    if not isinstance(utils.env, ImmutableSandboxedEnvironment):
        utils.env = sandboxed(utils.env)


def sandboxed(environment: Environment) -> ImmutableSandboxedEnvironment:
    """Return a sandbox with the filters and the treatment of names and newlines of the harness's environment."""
    filters: dict[str, Any] = environment.filters
    assert environment.undefined is StrictUndefined, "the harness's environment has changed"
    sandbox = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined, keep_trailing_newline=environment.keep_trailing_newline
    )
    sandbox.filters.update(filters)
    return sandbox
