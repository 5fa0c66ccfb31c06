"""The TorchTitan plug-in: Llama 2 with PC as a train spec, and a trainer that extends TorchTitan's.

Read `trainer` first: its `train_step` is the order of a step.

a step        trainer, fsdp_sync, rank_sums (what ranks tell each other), nonfinite, optimizers, arm, validate
its log       metrics, loss_spikes, slow_ranks, progress, console; diagnostics, activations, update_sizes
a start       start (from what a run begins), fingerprint (of which method), run_tokenizer (of which tokenizer),
              hf_folder (Hugging Face's format), environment (whether ranks agree)
checkpoints   checkpoint (which and when), checkpoint_writer, checkpoint_folder (reading)
model         llama2, loss, parallelize
TorchTitan    train_spec, upstream_config, cpu
"""
