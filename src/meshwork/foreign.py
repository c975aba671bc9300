"""Names that other templates use and where they lead here; only error sentences read this table."""

ACCUMULATION = (
    "trainer.micro_batch_size (accumulation follows from it and trainer.global_batch_size)"
)

KEYS = {
    "batch_size": "trainer.global_batch_size, over all ranks",
    "train_batch_size": "trainer.global_batch_size, over all ranks",
    "epochs": "trainer.max_epochs",
    "num_epochs": "trainer.max_epochs",
    "max_iters": "trainer.max_steps",
    "lr": "optimizer.lr",
    "learning_rate": "optimizer.lr",
    "wd": "optimizer.weight_decay",
    "num_workers": "data.workers",
    "ckpt_path": "checkpoint.resume to go on with a run, model.checkpoint_path for weights",
    "resume": "checkpoint.resume",
    "resume_from_checkpoint": "checkpoint.resume",
    "initial_checkpoint": "model.checkpoint_path",
    "model_name": "model.name, with model=timm",
    "img_size": "data.image_size",
    "drop": "model.drop_rate",
    "drop_path": "model.drop_path_rate",
    "smoothing": "task.label_smoothing",
    "opt": "optimizer=NAME, or optimizer=timm optimizer.name=NAME",
    "sched": "scheduler=NAME",
    "clip_grad": "trainer.clip_grad_norm",
    "gradient_clip_val": "trainer.clip_grad_norm",
    "accumulate_grad_batches": ACCUMULATION,
    "grad_accum_steps": ACCUMULATION,
    "devices": "torchrun --standalone --nproc-per-node=N train.py (one process a device)",
    "num_nodes": "torchrun --nnodes=N ... train.py (the launcher counts nodes)",
    "strategy": "parallel=NAME",
    "amp": "trainer.precision=bf16",
    "log_interval": "trainer.log_every_n_steps",
    "check_val_every_n_epoch": "trainer.val_every_n_epochs",
    "project": "logger.project",
    "output_dir": "run.root (where run folders are made) or run.dir (the exact folder)",
    "monitor": "objective.metric",
}

# Names of what other templates have and meshwork has not.
NOT_YET = {
    "patience": "early stopping",
    "model_ema": "an average of the weights (EMA)",
}

ONE_PROCESS = "ddp (one process is not split whatever the layout)"

# (group, option) -> what to type instead, perhaps with a remark; taken where that option exists.
OPTIONS = {
    ("parallel", "none"): ONE_PROCESS,
    ("parallel", "single"): ONE_PROCESS,
    ("parallel", "dp"): "ddp",
    ("parallel", "fsdp2"): "fsdp",
    ("parallel", "tp"): "tensor",
    ("parallel", "pp"): "pipeline",
    ("logger", "csv"): "none (metrics.jsonl is always written)",
    ("logger", "jsonl"): "none (metrics.jsonl is always written)",
    ("launcher", "submitit"): "slurm",
    ("launcher", "basic"): "local",
    ("optimizer", "adam"): "adamw (with optimizer.weight_decay=0 it is Adam)",
}
