"""Rewrite workflow/resources/models/descriptions.json.gz: the descriptions of the models in
shapes.json beside it."""

import gzip
import json
from pathlib import Path

from workflow.lib.model.architecture.shipped_shapes import DESCRIPTIONS, SHAPES
from workflow.lib.model.describe_model import describe_config
from workflow.lib.system.files import read_json

SHORT = (",", ":")

if __name__ == "__main__":
    entries = {
        hub_id: describe_config(entry["config"], origin=Path(hub_id)).document()
        for hub_id, entry in read_json(SHAPES).items()
    }
    lines = [
        f"{json.dumps(hub_id)}: {json.dumps(entry, separators=SHORT)}"
        for hub_id, entry in entries.items()
    ]
    text = "{\n" + ",\n".join(lines) + "\n}\n"
    DESCRIPTIONS.write_bytes(gzip.compress(text.encode(), mtime=0))
