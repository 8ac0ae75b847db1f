"""Templates of evaluation tasks, which may come from anywhere, rendered where they reach nothing.

The harness renders them in a plain Jinja environment, in which a template can walk to the
interpreter. Jinja's sandbox refuses that; endless loops and texts are stopped by `limits`. The
environment is a variable of the harness's `utils`, which its one function for templates reads
(lm_eval 0.4.13), so it is replaced there, once, in a process that does nothing but evaluate."""

from typing import Any

from jinja2 import Environment, StrictUndefined, Template
from jinja2.sandbox import ImmutableSandboxedEnvironment
from lm_eval import utils

from workflow.lib.data.reading.row import preview
from workflow.lib.system.errors import UserError
from workflow.lib.system.limits import BoundedWork, ExcessError

# An item of a task is a prompt for a model; the longest context has some million tokens.
MAX_RENDERED_CHARS = 2**24


def sandbox_task_templates() -> None:
    """Let the harness render its templates in a sandbox with the same filters."""
    if not isinstance(utils.env, ImmutableSandboxedEnvironment):
        utils.env = sandboxed(utils.env)


class _BoundedTemplate(Template):
    """A template whose rendering has bounds of time, memory and output."""

    source = ""

    def render(self, *args: Any, **kwargs: Any) -> str:
        try:
            with BoundedWork():
                text = super().render(*args, **kwargs)
        except ExcessError as excess:
            raise _excess_error(str(excess), self.source) from None
        if len(text) > MAX_RENDERED_CHARS:
            much = f"writes {len(text)} characters, more than {MAX_RENDERED_CHARS}"
            raise _excess_error(much, self.source)
        return text


class _BoundedSandbox(ImmutableSandboxedEnvironment):
    """Bounds the translation of templates too, in which Jinja computes what is constant."""

    template_class = _BoundedTemplate

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> Template:
        try:
            with BoundedWork():
                template = super().from_string(source, *args, **kwargs)
        except ExcessError as excess:
            raise _excess_error(str(excess), str(source)) from None
        assert isinstance(template, _BoundedTemplate), "the environment names the class"
        template.source = str(source)
        return template


def _excess_error(excess: str, source: str) -> UserError:
    return UserError(
        f"evaluate.tasks: the template {preview(source)!r} of a task {excess} for one item. "
        "Change it in the task's file, or remove the task."
    )


def sandboxed(environment: Environment) -> ImmutableSandboxedEnvironment:
    """Return a sandbox with the filters and newlines of the harness's environment."""
    filters: dict[str, Any] = environment.filters
    assert environment.undefined is StrictUndefined, "the harness's environment has changed"
    sandbox = _BoundedSandbox(
        undefined=StrictUndefined, keep_trailing_newline=environment.keep_trailing_newline
    )
    sandbox.filters.update(filters)
    return sandbox
