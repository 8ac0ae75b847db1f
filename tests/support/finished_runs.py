"""What a finished run of a project left."""

from tests.support.workflow_project import Project

ADAPTER = "adapter/adapter_model.safetensors"


def adapter_bytes(project: Project) -> bytes:
    return (project.folder("consolidate") / ADAPTER).read_bytes()
