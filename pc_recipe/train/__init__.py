"""The TorchTitan plug-in: Llama 2 with PC as a train spec, and a trainer that extends TorchTitan's.

model         llama2, loss, parallelize
a step        trainer (read it first), step, fsdp_sync, optimizers, nonfinite, validate
checkpoints   checkpoint (which and when), checkpoint_writer, checkpoint_folder (reading), fingerprint (of which method),
              run_tokenizer (of which tokenizer), hf_folder (a start from Hugging Face's format)
metrics       metrics, diagnostics, activations
a run         train_spec, upstream_config, environment, cpu
"""
