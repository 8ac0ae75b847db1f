"""Held-out rows that training rows repeat, or nearly.

Begin with `containment`; `exchanges` says what is compared. It imports the splits and documents of
`tokens` and drops nothing itself (`heldout_drops`)."""
