"""Losses and figures of all rows at once, from all logits in float64, as published and as TRL
computes them: by loops over documents, without what the library shares."""

from itertools import pairwise

import numpy as np
import torch
from torch.nn.functional import logsigmoid


class Answer:
    """A document: log p of its trained tokens (tokens,), and of the reference."""

    def __init__(self, log_probs, reference):
        self.log_probs, self.tokens = log_probs, len(log_probs)
        self.total = log_probs.sum()
        self.mean = log_probs.mean()
        self.ratio = self.total - reference.sum()


class TokenTable:
    """What all rows of a store say, token by token."""

    def __init__(self, store, logits):
        """logits: (rows * seq_len, vocab)."""
        rows, seq_len = store.input_ids.shape
        self.log_probs = logits.log_softmax(dim=-1).view(rows, seq_len, -1)
        self.store = store
        self.scores = store.scores.for_rows(range(rows))
        number = np.full((rows, seq_len), -1)
        number[store.loss_mask] = np.arange(store.loss_mask.sum())
        self._number = number

    def tokens(self):
        """Return trained tokens, and log p (n, vocab) where they are predicted."""
        places = np.argwhere(self.store.loss_mask)
        ids = [int(self.store.input_ids[row, place]) for row, place in places]
        return ids, torch.stack([self.log_probs[row, place - 1] for row, place in places])

    def examples(self):
        """Return the two documents of each example, and whether it is desirable."""
        found = []
        for row, positions in enumerate(self.store.position_ids):
            starts = [*np.flatnonzero(positions == 0), len(positions)]
            for first in range(0, len(starts) - 2, 2):
                spans = [range(starts[n], starts[n + 1]) for n in (first, first + 1)]
                desirable = self.store.desirable
                good = bool(desirable is not None and desirable[row, starts[first]])
                found.append((*(self._answer(row, span) for span in spans), good))
        return found

    def rewarded(self):
        """Return log p and the reference's of each document's trained tokens, its advantage, and
        log p by the sampler."""
        found = []
        for row, positions in enumerate(self.store.position_ids):
            edges = [*np.flatnonzero(positions == 0), len(positions)]
            for start, stop in pairwise(edges):
                trained, log_probs, reference = self._trained(row, range(start, stop))
                if trained:
                    advantage = float(self.store.optional["advantages"][row, trained[0]])
                    sampled = self.store.optional["sampled_log_probs"][row, trained]
                    sampled = torch.from_numpy(sampled).double()
                    found.append((log_probs, reference, advantage, sampled))
        return found

    def _answer(self, row, span):
        _, log_probs, reference = self._trained(row, span)
        return Answer(torch.stack(log_probs), reference)

    def _trained(self, row, span):
        trained = [place for place in span if self.store.loss_mask[row, place]]
        log_probs = [self.log_probs[row, p - 1, int(self.store.input_ids[row, p])] for p in trained]
        reference = self.scores.log_probs[self._number[row, trained]]
        return trained, log_probs, torch.from_numpy(reference).double()


Losses = tuple[torch.Tensor, dict[str, torch.Tensor]]


def _sft(table, given):
    ids, log_probs = table.tokens()
    weights = torch.from_numpy(table.store.weights[table.store.loss_mask]).double()
    losses = torch.stack([-log_probs[n, token] for n, token in enumerate(ids)])
    return (weights * losses).sum() / weights.sum(), {}


def mean(values):
    return torch.stack(values).mean()


def _of_pairs(table, loss_of, reward, sft_weight):
    pairs = [(chosen, rejected) for chosen, rejected, _ in table.examples()]
    loss = mean([loss_of(*pair) for pair in pairs])
    loss = loss - sft_weight * torch.cat([chosen.log_probs for chosen, _ in pairs]).mean()
    margins = [reward(chosen) - reward(rejected) for chosen, rejected in pairs]
    return loss, {
        "reward_chosen": mean([reward(chosen) for chosen, _ in pairs]),
        "reward_rejected": mean([reward(rejected) for _, rejected in pairs]),
        "reward_margin": mean(margins),
        "reward_accuracy": mean([(margin > 0).double() for margin in margins]),
        "log_probs_chosen": mean([chosen.total for chosen, _ in pairs]),
        "log_probs_rejected": mean([rejected.total for _, rejected in pairs]),
    }


def _dpo(table, given):
    p = given["preferences"]
    beta, e = p["beta"], p["label_smoothing"]

    def loss_of(chosen, rejected):
        x = beta * (chosen.ratio - rejected.ratio)
        return -(1 - e) * logsigmoid(x) - e * logsigmoid(-x)

    return _of_pairs(table, loss_of, lambda answer: beta * answer.ratio, p["sft_weight"])


def _orpo(table, given):
    beta = given["preferences"]["beta"]

    def odds(answer):
        p = answer.mean.exp()
        return p / (1 - p)

    def loss_of(chosen, rejected):
        return -beta * logsigmoid((odds(chosen) / odds(rejected)).log())

    return _of_pairs(table, loss_of, lambda answer: beta * answer.mean, 1.0)


def _distill(table, given):
    t, sft_weight = given["distill"]["temperature"], given["distill"]["sft_weight"]
    ids, log_probs = table.tokens()
    weights = torch.from_numpy(table.store.weights[table.store.loss_mask]).double()
    divergences, losses = [], []
    for n, token in enumerate(ids):
        likeliest = [int(i) for i in table.scores.top_ids[n]]
        others = [i for i in range(log_probs.shape[1]) if i not in likeliest]
        own = log_probs[n].exp()
        student = torch.cat([own[likeliest], own[others].sum()[None]]) ** (1 / t)
        top, rest = table.scores.top_log_probs[n], table.scores.rest[n]
        teacher = torch.tensor([*top, rest]).double().exp() ** (1 / t)
        student, teacher = student / student.sum(), teacher / teacher.sum()
        divergences.append((teacher * (teacher / student).log()).sum())
        losses.append(-log_probs[n, token])
    kl, sft = ((weights * torch.stack(x)).sum() / weights.sum() for x in (divergences, losses))
    return t**2 * kl + sft_weight * sft, {"teacher_kl": kl, "sft_loss": sft}


def _kto(table, given):
    p = given["preferences"]
    examples = table.examples()
    kl = mean([other.ratio for _, other, _ in examples])
    z = kl.detach().clamp(min=0)
    losses, rewards, totals = [], {True: [], False: []}, {True: [], False: []}
    for answer, _, good in examples:
        side, weight = (1, p["desirable_weight"]) if good else (-1, p["undesirable_weight"])
        losses.append(weight * (1 - 1 / (1 + torch.exp(-side * p["beta"] * (answer.ratio - z)))))
        rewards[good].append(p["beta"] * answer.ratio)
        totals[good].append(answer.total)
    return mean(losses), {
        "reward_desirable": mean(rewards[True]),
        "reward_undesirable": mean(rewards[False]),
        "log_probs_desirable": mean(totals[True]),
        "log_probs_undesirable": mean(totals[False]),
        "kl": kl,
    }


def _grpo(table, given):
    g, figures = given["grpo"], {name: [] for name in GRPO_FIGURES}
    totals = []  # of answers
    for answer, reference, advantage, sampled in table.rewarded():
        losses = []
        for log_p, old, s in zip(answer, reference, sampled, strict=True):
            r, q, weight = (log_p - old).exp(), (old - log_p).exp(), (old - s).exp()
            kept = r.clamp(1 - g["clip_low"], 1 + g["clip_high"])
            policy = torch.minimum(r * advantage, kept * advantage)
            kl = r * (q - q.log() - 1)
            weight = min(weight, torch.tensor(g["importance_cap"]))
            losses.append(g["kl"] * kl - weight * policy)
            clips = bool(policy < r * advantage)
            values = (float(clips), kl, r, -log_p, weight)
            for name, value in zip(GRPO_FIGURES, values, strict=True):
                figures[name].append(torch.as_tensor(value).double())
        totals.append((torch.stack(losses).sum(), len(losses)))
    if g["normalize"] == "token":
        loss = sum(total for total, _ in totals) / sum(count for _, count in totals)
    elif g["normalize"] == "answer":
        loss = mean([total / count for total, count in totals])
    else:
        loss = mean([total / g["constant"] for total, _ in totals])
    return loss, {name: mean(values) for name, values in figures.items()}


GRPO_FIGURES = ("clipped", "reference_kl", "ratio", "entropy", "importance")
DENSE = {
    "sft": _sft,
    "dpo": _dpo,
    "orpo": _orpo,
    "kto": _kto,
    "distill": _distill,
    **dict.fromkeys(("grpo by token", "grpo by answer", "grpo by constant"), _grpo),
}


def assert_gradients(found, expected):
    """Raise unless gradients agree but for rounding, by the largest of each tensor."""
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        largest = float(gradient.abs().max())
        assert largest > 0
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4 * largest)
