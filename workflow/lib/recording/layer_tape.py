"""A tape that knows the decoder layer of each event, so that layers can be repeated
(`some_layers`).

In forward and backward that is the layer that is at work. Before and after them, where all layers
are gone through one after the other, it is the layer of the tensors at hand."""

from workflow.lib.planning.memory.allocation_tape import Tape

NONE = -1  # no layer


class LayerTape(Tape):
    """Events with their layers, which are numbers, or `NONE`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = NONE
        """At work."""
        self.follows_tensors = True
        """Whether events belong to the layers of their tensors, and not to the one at work."""
        self.layers: list[int] = []
        """By event."""
        self.layer_of: list[int] = []
        """By tensor: the layer of the event that made it."""
        self._made_at: list[int] = []
        self._ended = False

    def end(self) -> None:
        """What follows is not of the run: the model is taken apart."""
        self._ended = True

    def _add(self, event: int | str) -> None:
        if self._ended:
            return
        layer = self.layer
        if isinstance(event, str):
            layer = self.layer = NONE
        elif event >= 0:
            self.layer_of.append(layer)
            self._made_at.append(len(self.events))
        elif self.follows_tensors or layer == NONE:
            layer = self.layer_of[~event]
        self.layers.append(layer)
        super()._add(event)

    def assign(self, tensor: int, layer: int) -> None:
        """Say that a tensor that was made with no layer at work belongs to one."""
        self.layer_of[tensor] = self.layers[self._made_at[tensor]] = layer
