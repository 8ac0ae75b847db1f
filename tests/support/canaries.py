"""Secrets that a user's environment may hold, made up, to be looked for where they must not be."""

CANARIES = {
    name: f"canary{number}SecretThatNobodyMaySee"
    for number, name in enumerate(
        [
            "HF_TOKEN",
            "HUGGING_FACE_HUB_TOKEN",
            "WANDB_API_KEY",
            "AWS_ACCESS_KEY_ID",
            "AWS_SECRET_ACCESS_KEY",
            "AWS_SESSION_TOKEN",
            "GITHUB_TOKEN",
            "DATABASE_PASSWORD",
        ]
    )
}
