"""Datasets of other trainers as sources of `data`: their files, columns and masks.

Files on the hub cannot be listed here, so a glob names those of a split. A glob without a match
stops the run."""

import json
import re
from pathlib import Path
from typing import Any

from workflow.importing.draft import Draft, Outcome, label
from workflow.lib.settings.config import is_hub_id
from workflow.lib.system.errors import UserError
from workflow.lib.system.input_files import read_input

INFO = "dataset_info.json"
NO_DATA = "data/train.jsonl"
BUILDERS = ("json", "csv", "parquet", "text", "arrow")
ANSWERS_ALONE = ("completion_only_loss", "assistant_only_loss")
MASKS = ("train_on_inputs", "train_on_prompt", "mask_history", *ANSWERS_ALONE)
SPLIT = re.compile(r"(\w+)(?:\[:(\d+)%\])?")
FORMATS = {
    "alpaca": "alpaca",
    "chat_template": "messages",
    "completion": "text",
    "pretrain": "text",
}


def read_datasets(draft: Draft) -> None:
    """Set the training and the held-out data, and which tokens are trained."""
    trainer, trainer_table = draft.source.trainer, draft.own_table
    on = {key: draft.get(key) for key in MASKS}
    loss_on: str = trainer_table.loss_on
    if on["mask_history"]:
        loss_on = "last_turn"
    elif on["train_on_inputs"] or on["train_on_prompt"]:
        loss_on = "all"
    elif any(on[key] is not None for key in ANSWERS_ALONE):
        loss_on = "completions" if any(on[key] for key in ANSWERS_ALONE) else "all"
    elif trainer_table.loss_note and draft.objective == "sft":
        draft.outcomes.append(
            Outcome("by default", (), f"data.loss_on = {loss_on!r}: {trainer_table.loss_note}")
        )
    draft.put("data.loss_on", loss_on if draft.objective == "sft" else "completions", *MASKS)
    if trainer == "axolotl":
        _axolotl(draft)
    elif trainer == "llama_factory":
        _llama_factory(draft)
    else:
        keys = ("dataset_name", "dataset_config", "dataset_train_split", "data_files")
        name, config, split, files = map(draft.get, keys)
        hub_entry = (
            [{"path": name, "name": config, "split": split, "data_files": files}] if name else []
        )
        column = draft.get("dataset_text_field")
        columns = {"text": column} if column not in (None, "text") else {}
        entries = [*hub_entry, *_entries(draft, "datasets")]
        sources = [_source(entry, columns) for entry in entries]
        _put(draft, "train", sources, *keys, "datasets", "dataset_text_field")
    share = draft.number("val_set_size") or 0
    if 0 < share < 1:
        draft.put("data.heldout_share", share, "val_set_size")
    if "heldout" not in draft.document["data"]:
        how = "" if 0 < share < 1 else "5% of the rows are held out (data.heldout_share)"
        draft.put("data.heldout", None, "val_set_size", how=how)
    draft.put("evaluate.tasks", [])


def _axolotl(draft: Draft) -> None:
    if draft.get("processor_type") and draft.get("skip_prepare_dataset"):
        draft.refuse("processor_type", "pictures, sounds and videos are not trained on here")
    for key, setting in (
        ("datasets", "train"),
        ("pretraining_dataset", "train"),
        ("test_datasets", "heldout"),
    ):
        if sources := [_axolotl_source(draft, entry) for entry in _entries(draft, key)]:
            _put(draft, setting, sources, key)
    if "train" not in draft.document.get("data", {}):
        _put(draft, "train", [], "datasets")


def _axolotl_source(draft: Draft, entry: dict[str, Any]) -> dict[str, Any]:
    kind = entry.get("type")
    fields = entry | kind if isinstance(kind, dict) else entry
    columns = {role: fields[key] for key, role in draft.own_table.columns.items() if key in fields}
    if draft.objective != "sft" and "messages" in columns:
        columns["prompt"] = columns.pop("messages")
    source = _source(entry, columns)
    word = re.split(r"[.:]", kind)[0] if isinstance(kind, str) else ""
    if draft.objective == "sft" and word in FORMATS:
        source["format"] = FORMATS[word]
    read_keys = {"path", "name", "data_files", "revision", *draft.own_table.columns}
    if "weight" in source or entry.get("split") == "train":
        read_keys.add("split")
    if word in FORMATS and word != "alpaca":
        read_keys.add("type")
    draft.add("datasets.", {key: value for key, value in fields.items() if key not in read_keys})
    return source


def _entries(draft: Draft, key: str) -> list[dict[str, Any]]:
    value = draft.get(key) or []
    entries = [
        {"path": e} if isinstance(e, str) else e
        for e in ([value] if isinstance(value, dict | str) else value)
    ]
    if not all(isinstance(entry, dict) and entry.get("path") for entry in entries):
        raise draft.wrong(key, "must be a list of datasets, each with a path")
    return [{key: value for key, value in entry.items() if value is not None} for entry in entries]


def _source(entry: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    """Return a source with `repository`, if it is on the hub, and the `paths` of its files."""
    path, files = str(entry["path"]), entry.get("data_files")
    listed = [files] if isinstance(files, str) else files or []
    source: dict[str, Any] = {"columns": columns} if columns else {}
    part = SPLIT.match(str(entry.get("split") or "train"))
    if part and part[2]:
        source["weight"] = int(part[2]) / 100
    if path in BUILDERS and listed:
        return source | {"paths": listed}
    if not is_hub_id(path) or Path(path).suffix[1:] in (*BUILDERS, "jsonl"):
        return source | {"paths": [str(Path(path, file)) for file in listed] or [path]}
    folder = f"{entry['name']}/" if entry.get("name") else "**/"
    location = {"repository": path, "revision": entry.get("revision")}
    return source | location | {"paths": listed or [f"{folder}*{part[1] if part else ''}*"]}


def _llama_factory(draft: Draft) -> None:
    folder = Path(str(draft.get("dataset_dir") or "data").removeprefix("REMOTE:"))
    folders = [parent / folder for parent in (Path(), *draft.source.file.parents)]
    folder = next((candidate for candidate in folders if (candidate / INFO).is_file()), folder)
    info = _dataset_info(folder / INFO) if (folder / INFO).is_file() else {}
    for key, setting in (("dataset", "train"), ("eval_dataset", "heldout")):
        sources = [
            _listed(name, info, draft.own_table.columns, folder) for name in draft.texts(key)
        ]
        if sources or setting == "train":
            _put(draft, setting, sources, key)
    if draft.get("objective") == "pt":
        draft.put("data.format", "text")


def _dataset_info(file: Path) -> dict[str, Any]:
    try:
        info = json.loads(read_input(file))
    except json.JSONDecodeError as error:
        raise UserError(f"{file}: it is no JSON ({error}). Correct it.") from None
    if not isinstance(info, dict) or not all(isinstance(entry, dict) for entry in info.values()):
        raise UserError(f"{file}: it must name datasets, each with keys below it. Correct it.")
    return info


def _listed(name: str, info: dict[str, Any], roles: dict[str, str], folder: Path) -> dict[str, Any]:
    """Return the source of a dataset in dataset_info.json, or a guess for an unlisted one."""
    entry = info.get(name, {})
    names = entry.get("columns", {}).items()
    columns = {roles[key]: column for key, column in names if key in roles}
    if entry.get("ranking") and "instruction" in columns:
        columns["prompt"] = columns.pop("instruction")
    path = entry.get("hf_hub_url") or str(folder / entry.get("file_name", f"{name}.json"))
    subset = {"name": entry.get("subset"), "split": entry.get("split")}
    guessed = {"note": f"no {INFO} here has {name}, so its file is guessed"}
    return _source({"path": path} | subset, columns) | ({} if entry else guessed)


def _put(draft: Draft, setting: str, sources: list[dict[str, Any]], *keys: str) -> None:
    """Set `data.train` or `data.heldout`; datasets of several repositories become folders."""
    data = draft.document.setdefault("data", {})
    hubs = {source.get("repository") for source in sources}
    is_one_hub = len(hubs) == 1 and data.get("source") in (None, *hubs)
    entries, notes = list[Any](), list[str]()
    for source in sources:
        hub, revision, paths = (
            source.pop(key, None) for key in ("repository", "revision", "paths")
        )
        notes += [source.pop("note")] if "note" in source else []
        if hub and is_one_hub:
            data |= {"source": hub} | ({"revision": revision} if revision else {})
            notes.append(f"files of data.source = {hub}; compare with its list of files")
        elif hub:
            folder = f"data/{label(hub)}"
            paths = [f"{folder}/{path}" for path in paths]
            notes.append(f"first: hf download {hub} --repo-type dataset --local-dir {folder}")
        entries += [{"path": path, **source} if source else path for path in paths]
    if not entries:
        entries, notes = [NO_DATA], ["the file names no dataset; put the path of yours there"]
        draft.spelled.setdefault(keys[0], keys[0])
    if len(entries) == 1 and isinstance(entries[0], dict) and setting == "train":
        data |= {key: entries[0].pop(key) for key in ("format", "columns") if key in entries[0]}
        entries = [entries[0]["path"]] if entries[0].keys() == {"path"} else entries
    value = entries[0] if len(entries) == 1 else entries
    how = "; ".join(dict.fromkeys(notes))
    draft.put(f"data.{setting}", value, *keys, how=how)
    if setting == "train":
        data["name"] = label(
            str(next(iter(hubs)) if is_one_hub and None not in hubs else draft.source.file.stem)
        )
