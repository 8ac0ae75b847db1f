"""A PEFT adapter's folder as one object: config, names of tensors, and a reader."""

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from workflow.lib.checkpoints.files.adapter_config import read_adapter_config
from workflow.lib.checkpoints.files.model_files import ADAPTER, ADAPTER_WEIGHTS
from workflow.lib.checkpoints.files.stack_names import PREFIX, StackNames, stacked
from workflow.lib.checkpoints.safetensors_reader import CheckpointReader, open_whole
from workflow.lib.system.errors import UserError


class Adapter:
    """A folder with an adapter: one that was exported here, or a user's own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def config(self) -> dict[str, Any]:
        """PEFT's settings, of stacks if the file has experts one by one."""
        return read_adapter_config(self.folder)

    @property
    def _parameters(self) -> list[str]:
        return [*(self.config.get("target_parameters") or ())]

    @property
    def names(self) -> StackNames:
        """The tensors' names in the training and in the file."""
        return StackNames(path for path in self._parameters if not path.endswith(".weight"))

    @property
    def targets(self) -> list[str] | str:
        """The adapted modules by their names in the training."""
        paths = [path.removesuffix(".weight") for path in self._parameters]
        modules: list[str] | str = self.config["target_modules"]
        return [*modules, *paths] if paths else modules

    def reader(self) -> "AdapterReader":
        return AdapterReader(self.folder)

    def tensors(self) -> dict[str, torch.Tensor]:
        with self.reader() as reader:
            return {name: reader.tensor(name) for name in reader.names()}

    def check_exported(self) -> None:
        """Raise `UserError` unless config and weights of an export are there, and whole."""
        for name in (ADAPTER, ADAPTER_WEIGHTS):
            if not (self.folder / name).is_file():
                raise UserError(
                    f"{self.folder} holds no exported adapter ({name} is not there). Delete the "
                    "folder and repeat the command; consolidate makes it again."
                )
        open_whole(self.folder / ADAPTER_WEIGHTS, made_here=True)


class AdapterReader(CheckpointReader):
    """An adapter's file, whose experts may be stored one by one (`expert_adapters`)."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single=ADAPTER_WEIGHTS)
        stacks = stacked(super().names())
        names = StackNames(path.removeprefix(PREFIX) for path in stacks)
        self._stacks = {
            names.exported(f"{PREFIX}{path.removeprefix(PREFIX)}.lora_{part}.weight"): (
                part,
                experts,
            )
            for path, experts in stacks.items()
            for part in "AB"
        }
        self._inside = {
            f"{path}.lora_{part}.weight"
            for part, experts in self._stacks.values()
            for paths in experts
            for path in paths
        }

    def names(self) -> list[str]:
        return [*(n for n in super().names() if n not in self._inside), *self._stacks]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensor(name).shape) if name in self._stacks else super().shape(name)

    def dtype(self, name: str) -> str:
        if name not in self._stacks:
            return super().dtype(name)
        part, experts = self._stacks[name]
        return super().dtype(f"{experts[0][0]}.lora_{part}.weight")

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name not in self._stacks:
            return super().rows(name, start, stop)
        return self.tensor(name)[start : max(start, stop)]

    def tensor(self, name: str) -> torch.Tensor:
        """Return A (experts * rank, in), or B (out, rank * experts)."""
        if name not in self._stacks:
            return super().tensor(name)
        part, experts = self._stacks[name]
        values = [
            [super(AdapterReader, self).tensor(f"{path}.lora_{part}.weight") for path in paths]
            for paths in experts
        ]
        if part == "A":
            return torch.cat([row for rows in values for row in rows])
        blocks = [torch.block_diag(*parts) for parts in values]
        return torch.stack(blocks, dim=-1).flatten(1)
