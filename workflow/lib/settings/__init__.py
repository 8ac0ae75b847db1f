"""All settings, with bounds, defaults and one readable line per mistake.

Begin with `config` (`load_config`, `RunConfig`) and `errors_in_words`. `schedule` computes facts
from the settings alone: number of steps, learning rate, order of the data. It imports `system`, and
no torch. It opens no model and no data."""
