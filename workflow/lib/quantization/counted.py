"""Which tokens of a batch calibrate, as a module inside a decoder layer gets them."""

from dataclasses import dataclass

import torch

from workflow.lib.model.documents import Documents


@dataclass(frozen=True)
class Counted:
    """Masks of rows that count. whole: (tokens,) of packed rows, None: all; apart: by call of a
    module in a recurrent layer, which gets documents by group."""

    whole: torch.Tensor | None = None
    apart: tuple[torch.Tensor, ...] = ()

    def of(self, rows: torch.Tensor, *, call: int) -> torch.Tensor:
        """Return the counted rows of a module's rows (rows, ...) in its `call`-th call, from 0."""
        mask = self.whole
        if call < len(self.apart) and len(self.apart[call]) == len(rows):
            mask = self.apart[call]
        return rows if mask is None or len(mask) != len(rows) else rows[mask]


def counted_tokens(counted: torch.Tensor | None, documents: Documents | None) -> Counted:
    """Return what counts in rows of which `counted` (rows, tokens) does (None: all). documents:
    that recurrent layers take one by one; None if the model has none."""
    whole = None if counted is None else counted.flatten()
    if documents is None or documents.order is None:
        return Counted(whole)
    of_tokens = torch.ones_like(documents.order, dtype=torch.bool) if whole is None else whole
    places = sum(count * length for count, length in documents.shapes)
    at_places = torch.zeros(places, dtype=torch.bool, device=of_tokens.device)
    at_places[documents.order] = of_tokens  # what is filled up does not count
    sizes = [count * length for count, length in documents.shapes]
    return Counted(whole, at_places.split(sizes))
