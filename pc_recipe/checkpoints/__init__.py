"""What a checkpoint is: how its folder is written and read, and which method, model and tokenizer its weights belong to.

folder, writer    a checkpoint's files, checksums and index; nothing in them is executed
values            what may be in it beside tensors
fingerprint       the method and the model that it belongs to
run_tokenizer     the tokenizer that it belongs to
hf_folder         weights in Hugging Face's format

When a run saves and loads one: `pc_recipe.train.checkpoint` and `pc_recipe.train.start`.
"""
