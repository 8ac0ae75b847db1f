"""Names of adapters on stacks of experts: in training, and in PEFT's files.

In training a stack is a module, so its adapter has the stack's own path
(`model.layers.0.mlp.experts.gate_up_proj.lora_A.weight`). PEFT (0.21, `ParamWrapper`) wraps the
module of the experts once for each adapted parameter, in the module's order. Only the depth of its
wrapper identifies a parameter: the last one has the outermost, `...mlp.experts`, the one before it
`...mlp.experts.base_layer`."""

from collections.abc import Iterable, Mapping

PREFIX = "base_model.model."  # PEFT's, of every name


class StackNames:
    """Names of an adapter's tensors in training and in PEFT; stacks: the adapted ones, in order."""

    def __init__(self, stacks: Iterable[str]) -> None:
        wrappers = _wrappers(stacks)
        self._exported = {f"{PREFIX}{path}": f"{PREFIX}{new}" for path, new in wrappers.items()}
        self._trained = {new: path for path, new in self._exported.items()}

    def exported(self, name: str) -> str:
        return _renamed(name, self._exported)

    def trained(self, name: str) -> str:
        return _renamed(name, self._trained)


def _wrappers(stacks: Iterable[str]) -> dict[str, str]:
    modules: dict[str, list[str]] = {}
    for path in stacks:
        modules.setdefault(path.rpartition(".")[0], []).append(path)
    return {
        path: module + ".base_layer" * depth
        for module, paths in modules.items()
        for depth, path in enumerate(reversed(paths))
    }


def _renamed(name: str, paths: Mapping[str, str]) -> str:
    path, mark, suffix = name.partition(".lora_")
    return paths.get(path, path) + mark + suffix
