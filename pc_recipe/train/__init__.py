"""The TorchTitan plug-in: Llama 2 with PC as a train spec, and a trainer that extends TorchTitan's.

Read `trainer` first: its `train_step` is the order of a step.

a step        trainer, fsdp_sync, rank_sums (what ranks tell each other), nonfinite, optimizers, arm (a study's own code),
              validate
its log       metrics, loss_spikes, slow_ranks, progress, console; diagnostics, activations, update_sizes
a start       start (which weights a run begins with), fingerprint (whether their method is this run's), run_tokenizer
              (whether their tokenizer is), hf_folder (Hugging Face's format), environment (whether ranks agree)
checkpoints   checkpoint (which and when), checkpoint_writer, checkpoint_folder (reading)
model         llama2, parallelize
TorchTitan    train_spec, upstream_config, cpu
"""
