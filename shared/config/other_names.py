"""What other training tools call their settings, for people who come from them.

Read in two places: as flags of `run` and `sft` (launch/flags.py), and where a configuration has a key that is unknown
(load.py). No library is imported here, because flags are read before any is looked for.

Underscores stand for hyphens too. `max_steps` counts updates in TRL: a step has one, unless `batch.updates` or
`loss.passes` asks for more. `beta` is TRL's as long as its `use_bias_correction_kl` is true, the default of 1.16; if it
was false, set `loss.kl_gradient=k3` as well.
"""

OTHER_NAMES = {
    "adam_beta1": "optimizer.beta1",
    "adam_beta2": "optimizer.beta2",
    "beta": "loss.kl_beta",
    "delta": "loss.dual_clip",
    "group_size": "rollout.group",
    "learning_rate": "optimizer.lr",
    "lora_alpha": "lora.alpha",
    "lora_r": "lora.rank",
    "lora_rank": "lora.rank",
    "lr": "optimizer.lr",
    "max_completion_length": "rollout.max_new_tokens",
    "max_grad_norm": "optimizer.max_grad_norm",
    "max_response_length": "rollout.max_new_tokens",
    "max_steps": "run.steps",
    "num_generations": "rollout.group",
    "num_iterations": "loss.passes",
    "off_policy_mask_threshold": "loss.stale_limit",
    "r": "lora.rank",
    "random_state": "run.seed",
    "run_name": "tracking.name",
    "sapo_temperature_neg": "loss.tau_negative",
    "sapo_temperature_pos": "loss.tau_positive",
    "save_steps": "checkpoint.every",
    "temperature": "rollout.temperature",
    "warmup_steps": "optimizer.warmup_steps",
    "weight_decay": "optimizer.weight_decay",
}
"""Name -> the key that means the same, with the same value."""

BATCH = (
    "a step has rollout.prompts groups of rollout.group completions, and in sft rollout.prompts examples; use"
    " `rollout.prompts=N`. Micro-batches are cut to fit the memory"
)
STEPS = "a run is a number of steps, each of rollout.prompts new prompts; use `run.steps=N`"
LENGTHS = "prompts and completions have a limit each; use `tasks.max_prompt_tokens=N` and `rollout.max_new_tokens=N`"
TRUNCATES = (
    "it changes the distribution that tokens are drawn from, but the learner scores them under the whole one, so their"
    " ratio would be biased; use `rollout.temperature=T`, which both sides apply"
)
WEIGHTS = (
    'a reward has its weight where it is named, as in "rewards.py:accuracy" = 2.0 in [verifier.rewards];'
    " verifier.correct names the one that says what is correct"
)
REWARDS = (
    "use `verifier.kind=callable` and `verifier.function=rewards.py:accuracy`, or name several, each with its weight,"
    " in [verifier.rewards]"
)
REFERENCE = (
    "the reference of loss.kl_beta does not move within a run, unless it follows the stages of a curriculum"
    " (`curriculum.kl_to=stage`)"
)
RECOMPUTES = "use `batch.recompute=always`; auto, the default, does so where the memory would not be enough"
EVALUATES = "use `eval.every=N`, the steps between two evaluations"
MODEL = "use `model.path=FOLDER`, or a hub id"
VLLM = "use `actor.engine=vllm`, or vllm_server for a server that you start"
CARDS = "`compute.ranks=N` is a learner on N cards; compute.learner_card and compute.actor_card choose cards"
RESUMES = "use the command `resume DIR`, which takes the newest checkpoint"
FULL = "the base is frozen in 4 bits and shared by both processes; use a high `lora.rank=256` instead"
INSTEAD = {
    "batch_size": BATCH,
    "bf16": "use `compute.dtype=bf16`; auto, the default, takes it where the machine computes in it",
    "config": "give the file itself, my.toml or my.yaml, right after the command",
    "dataset_name": "use `tasks.source=NAME`, for example gsm8k, a .jsonl file or a hub id",
    "entropy_coef": "there is no bonus for entropy; a higher `loss.clip_high=X`, or [constraint], slows its fall",
    "epochs": STEPS,
    "epsilon": "use `loss.clip_low=X`, and `loss.clip_high=X` if epsilon_high is not given; for cispo leave"
    " loss.clip_low out",
    "epsilon_high": "use `loss.clip_high=X`; for cispo X is epsilon_high - 1",
    "eval_steps": EVALUATES,
    "eval_strategy": EVALUATES,
    "fast_inference": VLLM,
    "fp16": "there is no fp16; use `compute.dtype=bf16`, or fp32",
    "full_finetuning": FULL,
    "gpu_memory_utilization": "use `actor.kv_mb=N`, the memory of vLLM for keys and values in MB",
    "gradient_accumulation_steps": "micro-batches are cut to fit the memory, whatever the size of a step; use"
    " `rollout.prompts=N` for larger steps, and `batch.updates=N` for several updates in a step",
    "gradient_checkpointing": RECOMPUTES,
    "importance_sampling_level": "use `loss.kind=gspo` for sequence; with other kinds each token has its own ratio",
    "load_in_4bit": "the base is in 4 bits already, as NF4; `model.quantization=none` turns that off",
    "load_in_8bit": "there are no 8 bits; the base is in 4 bits, or as it is with `model.quantization=none`",
    "logging_steps": "every step is logged, in metrics.jsonl; leave it out",
    "lora_dropout": "actor and learner would compute with different masks, so their log-probs of the same tokens would"
    " differ; leave it out, and use `optimizer.weight_decay=X` or `loss.kl_beta=X` against overfitting",
    "lora_weights": "use the command `generate DIR` with the run's directory",
    "loss_type": "use `loss.kind=grpo`, dr_grpo, dapo, gspo, cispo, sapo or dppo; there is no bnpo, luspo or vespo",
    "lr_scheduler_type": "use `optimizer.schedule=constant`, linear or cosine",
    "mask_truncated_completions": "use `verifier.on_truncated=mask`",
    "max_length": LENGTHS,
    "max_lora_rank": "use `lora.rank=N`; nothing else has to be told the rank",
    "max_prompt_length": "a longer prompt is left out here, not cut; use `tasks.max_prompt_tokens=N`",
    "max_seq_length": LENGTHS,
    "min_p": TRUNCATES,
    "model": MODEL,
    "model_id": MODEL,
    "model_name": MODEL,
    "model_name_or_path": MODEL,
    "multi_objective_aggregation": "use `reward.advantage=gdpo` for normalize_then_sum; otherwise rewards are summed as"
    " they are",
    "nproc_per_node": CARDS,
    "num_gpus": CARDS,
    "num_train_epochs": STEPS,
    "optim": "there is one optimizer, AdamW in fp32 on the adapter; leave it out",
    "output_dir": "use `--out DIR`",
    "per_device_train_batch_size": BATCH,
    "ref_model_mixup_alpha": REFERENCE,
    "ref_model_sync_steps": REFERENCE,
    "repetition_penalty": "it changes the distribution by the tokens so far, and the learner does not; leave it out",
    "report_to": "use `tracking.kind=wandb`, trackio or tensorboard",
    "resume": RESUMES,
    "resume_checkpoint": RESUMES,
    "resume_from_checkpoint": RESUMES,
    "reward.weights": WEIGHTS,
    "reward_funcs": REWARDS,
    "reward_model": REWARDS,
    "reward_weights": WEIGHTS,
    "save_strategy": "use `checkpoint.every=N`, the steps between two checkpoints",
    "save_total_limit": "use `checkpoint.keep=N`; the best one is kept as well",
    "scale_rewards": "use `reward.advantage=std` for group, mean for none, or batch, which divides by the standard"
    " deviation of r - mean",
    "steps_per_generation": "use `batch.updates=N`, which is steps_per_generation / gradient_accumulation_steps",
    "sync_ref_model": REFERENCE,
    "target_modules": 'use lora.targets, a list such as ["q_proj", "v_proj"]; without it, all linear layers of a block'
    " have an adapter",
    "top_entropy_quantile": "use `loss.entropy_fraction=0.2`, a share of the tokens of groups that teach",
    "top_k": TRUNCATES,
    "top_p": TRUNCATES,
    "torch_dtype": "use `compute.dtype=bf16`, or fp32",
    "use_bias_correction_kl": "use `loss.kl_gradient=kl` for true, k3 for false",
    "use_entropy_mask": "say which share of the tokens is trained on: `loss.entropy_fraction=0.2`",
    "use_gradient_checkpointing": RECOMPUTES,
    "use_rslora": "use `lora.rslora=true`",
    "use_vllm": VLLM,
    "vllm_importance_sampling_cap": "use `loss.importance_cap=X`, with either engine",
    "vllm_importance_sampling_clip_max": "use `loss.importance_cap=X`, with either engine",
    "vllm_importance_sampling_clip_min": "use `loss.importance_floor=X`, for the two masks of loss.importance",
    "vllm_importance_sampling_correction": "it is always done, with either engine; `loss.importance_cap=0` turns it"
    " off",
    "vllm_importance_sampling_mode": "use `loss.importance=token`, token_mask, sequence or sequence_mask",
    "vllm_mode": "use `actor.engine=vllm` for colocate, vllm_server for server",
    "warmup_ratio": "use `optimizer.warmup_steps=N`, a number of steps",
}
"""Name -> what to do, where no key means exactly the same."""
