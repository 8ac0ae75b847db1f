"""Documents for people: the HTML report, the model card, figures for papers.

Begin with `run_results` (a run's artifacts, checked and paired) and `html_page`. It imports
`artifacts`, `planning` and `settings`, and no torch. It computes no result anew."""
