"""From a row to token ids and the mask of trained tokens.

Begin with `row_columns` and `row_formats` (the format of a row, and its meaning) and
`sample_encoder` (`SampleEncoder`: a row to ids and mask). `preference_rows` reads pairs and rated
answers. `keys_read` accounts for every key of a row. `trained_turns` finds the assistant's turns in
the rendered text. Chat templates run in a sandbox (`chat_template`); text of a row can never become
a special token (`safe_encoder`). It imports `reading`, and writes nothing to disk."""
