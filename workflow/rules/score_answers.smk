# Reward functions score sampled answers, in processes of their own.
rule score_answers:
    input:
        settings=settings("score_answers"),
        answers=from_run(layout.answers_dir),
        functions=from_run(reward_files),
        first=from_run(layout.first_rewards),
    output:
        "results/rewards/{rewards}/rewards.jsonl",
    log:
        "logs/score_answers/{rewards}.log",
    conda:
        "../../envs/torch.yaml"
    threads: all_cores
    shell:
        "python -m workflow.scripts.score_answers --config {input.settings:q} --answers {input.answers:q}"
        " --first {input.first:q} --processes {threads} --output {output:q} --log {log:q}"
