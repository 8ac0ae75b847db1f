"""Snakemake's S3 storage, with folders that appear while Snakemake runs, and a bucket that stays.

`--default-storage-provider s3folders`, with this folder's parent on PYTHONPATH; settings and
variables are those of `s3`, under this name (SNAKEMAKE_STORAGE_S3FOLDERS_...). Differences from
snakemake-storage-plugin-s3 0.3.6:

- It remembers that a folder is not there, so the folder that a job made elsewhere stays missing to
  the Snakemake that sent the job. Here only "it is a folder" is remembered.
- It deletes a bucket whose last object it removes. Here it never does.
"""

from snakemake_storage_plugin_s3 import StorageObject as S3Object
from snakemake_storage_plugin_s3 import StorageProvider as S3Provider
from snakemake_storage_plugin_s3 import StorageProviderSettings

__all__ = ["StorageObject", "StorageProvider", "StorageProviderSettings"]


class StorageProvider(S3Provider):  # type: ignore[misc]
    """The connection; Snakemake finds `StorageObject` beside it."""


class StorageObject(S3Object):  # type: ignore[misc]
    """A file of a bucket, or a folder: all objects whose keys go on after its own and a slash."""

    def is_dir(self) -> bool:
        """Tell whether there is such a folder now."""
        self._is_dir = self._is_dir or any(self.get_subkeys())
        return bool(self._is_dir)

    def remove(self) -> None:
        """Remove the file, or all files of the folder."""
        for item in self.get_subkeys() if self.is_dir() else [self.s3obj()]:
            item.delete()
        self._is_dir = None
