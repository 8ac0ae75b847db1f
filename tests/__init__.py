import os

# As `workflow.scripts` sets it for the stages, before any test imports torch.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
