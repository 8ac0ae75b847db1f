"""Which keys of a message a chat template reads."""

import jinja2
from jinja2 import nodes

from workflow.lib.data.encoding.chat_template import GENERATION_TAG


def keys_in_template(text: str) -> frozenset[str]:
    """Return the names that a chat template may look up in a message."""
    environment = jinja2.Environment(extensions=["jinja2.ext.loopcontrols"], autoescape=True)
    tree = environment.parse(GENERATION_TAG.sub("", text))
    constants = {n.value for n in tree.find_all(nodes.Const) if isinstance(n.value, str)}
    return frozenset(constants | {n.attr for n in tree.find_all(nodes.Getattr)})
