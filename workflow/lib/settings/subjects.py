"""The models that an evaluation may measure, named by what they are."""

from typing import Literal, get_args

SubjectName = Literal["original", "base", "start", "tuned", "tuned_on_original", "merged"]
Served = Literal["tuned", "tuned_on_original", "merged"]
# In the order in which they are shown; each is compared with those before it.
SUBJECTS: tuple[SubjectName, ...] = get_args(SubjectName)
# What people read in place of a subject's name.
SUBJECT_LABELS: dict[SubjectName, str] = {
    "original": "original",
    "base": "NF4 base",
    "start": "start",
    "tuned": "tuned",
    "tuned_on_original": "tuned on original",
    "merged": "merged",
}
SUBJECT_MEANINGS: dict[SubjectName, str] = {
    "original": "the model before quantization, in 16 bits",
    "base": "the same in 4 bits (NF4), as it was trained on",
    "start": "the adapter of the run that training started from, on the NF4 base",
    "tuned": "the adapter on the NF4 base",
    "tuned_on_original": "the adapter on the original",
    "merged": "one model with the adapter in its weights, in 16 bits",
}
# What gains are measured against: the first of these that is measured.
REFERENCES: tuple[SubjectName, ...] = ("original", "base")
