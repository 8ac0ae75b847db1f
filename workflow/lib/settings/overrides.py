"""Settings above `runs:`, and a run's own settings, which override them; as parsed documents."""

from collections.abc import Mapping

# Two settings of `train` for one length: who sets one of them means it alone.
LENGTHS = ("epochs", "max_steps")


def merge(base: Mapping[str, object], override: Mapping[str, object]) -> dict[str, object]:
    """Return `base` overridden by `override`, section by section; lists are replaced.

    An empty section (null) overrides nothing."""
    merged = dict(base)
    for key, value in override.items():
        old = merged.get(key)
        if isinstance(old, Mapping) and isinstance(value, Mapping | None):
            value = merge(old, value or {})
        merged[key] = value
    return merged


def overridden(base: Mapping[str, object], override: Mapping[str, object]) -> dict[str, object]:
    """Return `merge`, in which a length of the training replaces the other one of `base`."""
    train, run_train = base.get("train"), override.get("train")
    if isinstance(train, Mapping) and isinstance(run_train, Mapping):
        lengths = [key for key in LENGTHS if run_train.get(key) is not None]
        if len(lengths) == 1:
            without_lengths = {key: train[key] for key in train if key not in LENGTHS}
            base = {**base, "train": without_lengths}
    return merge(base, override)


def without_effect(shared: Mapping[str, object], runs: Mapping[str, object]) -> list[str]:
    """Return the settings of `shared` that every run overrides, as `section.key`."""
    return [
        f"{section}.{key}"
        for section, settings in shared.items()
        if isinstance(settings, Mapping)
        for key in settings
        if all(key in _keys_set(override, section) for override in runs.values())
    ]


def _keys_set(override: object, section: str) -> set[str]:
    settings = override.get(section) if isinstance(override, Mapping) else None
    keys = set(settings) if isinstance(settings, Mapping) else set()
    return keys | set(LENGTHS) if section == "train" and keys & set(LENGTHS) else keys
