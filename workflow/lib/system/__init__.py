"""Files, errors, locks and GPUs: needs of any program on this machine.

Begin with `errors` (`UserError`, the one exception that a user sees), `files` (files written whole
or not at all, hashes, provenance) and `gpu_leases` (GPUs that no two jobs share). It imports no
other package of the library, and no torch. It knows no model, data or settings."""
