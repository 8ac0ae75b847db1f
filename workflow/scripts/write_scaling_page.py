"""Write `workflow/docs/scaling.md` anew: what the time model predicts for 8 to 512 GPUs.

python -m workflow.scripts.write_scaling_page
"""

from workflow.lib.planning.timing.many_gpus import DOCUMENT, document
from workflow.lib.system.files import write_text

if __name__ == "__main__":
    write_text(DOCUMENT, document())
