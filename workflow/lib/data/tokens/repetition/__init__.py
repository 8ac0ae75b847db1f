"""Held-out rows that training rows repeat, or nearly repeat.

Begin with `containment`; `exchanges` are the compared parts. It imports the splits and documents of
`tokens` and drops nothing itself (`heldout_drops`)."""
