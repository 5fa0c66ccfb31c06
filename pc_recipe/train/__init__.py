"""The TorchTitan plug-in: Llama 2 with PC as a train spec, and a trainer that extends TorchTitan's.

Read `trainer` first: its `train_step` is the order of a step.

a step        trainer, fsdp_sync, rank_sums (what ranks tell each other), nonfinite, optimizers, arm (a study's own code),
              validate
its log       metrics, spans, loss_spikes, slow_ranks, progress, console; diagnostics, activations, update_sizes
a start       start (which weights a run begins with), environment (whether ranks agree),
              inputs (what a result depends on beside the settings)
checkpoints   checkpoint (which and when); what one is: `pc_recipe.checkpoints`
model         llama2, parallelize
TorchTitan    train_spec, upstream_config, cpu
"""
