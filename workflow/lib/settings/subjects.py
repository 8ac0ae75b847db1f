"""The models that an evaluation may measure, and their names."""

from typing import Literal, get_args

SubjectName = Literal["original", "base", "start", "tuned", "tuned_on_original", "merged"]
Served = Literal["tuned", "tuned_on_original", "merged"]
# In display order; each is compared with those before it.
SUBJECTS: tuple[SubjectName, ...] = get_args(SubjectName)
# Names of subjects for people.
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
    "start": "the adapter that training started from, on the NF4 base",
    "tuned": "the adapter on the NF4 base",
    "tuned_on_original": "the adapter on the original",
    "merged": "one model with the adapter in its weights, in 16 bits",
}
# References of gains: the first measured one.
REFERENCES: tuple[SubjectName, ...] = ("original", "base")
