"""Names in a chat template: the keys of messages that it reads, and its arguments.

The arguments of `data.template_kwargs` are written into the template that is exported and
evaluated, as defaults. So whatever renders it, renders as training did, unless told otherwise.
"""

from collections.abc import Mapping

import jinja2
from jinja2 import nodes

from workflow.lib.data.encoding.chat_template import GENERATION_TAG


def keys_in_template(text: str) -> frozenset[str]:
    """Return the names that a chat template may look up in a message."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
    tree = environment.parse(GENERATION_TAG.sub("", text))
    constants = {n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)}
    return frozenset(constants | {n.attr for n in tree.find_all(nodes.Getattr)})


def with_arguments(template: str, arguments: Mapping[str, object]) -> str:
    """Return a template that takes these for the arguments that it is not given. Jinja reads
    Python's literals."""
    defaults = [
        f"{{% if {name} is not defined %}}{{% set {name} = {value!a} %}}{{% endif %}}"
        for name, value in arguments.items()
    ]
    return "".join(defaults) + template
