"""Rows that repeat others: held-out ones that are trained, and near-duplicates within a split.

Begin with `near_duplicates` (what is counted) and `containment` (what is dropped); `exchanges` says
what is compared. It imports the splits and documents of `tokens` and drops nothing itself
(`heldout_drops`)."""
