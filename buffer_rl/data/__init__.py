"""Data files: reading, validation, epoch order; data sources of a user's own.

options       the flags of prompts and their rows
files         bytes of local and remote files, decompressed, or of large local ones on access; paths with a slice
reader        a path to a validated dataset: the files behind it, their formats, bad rows, ids that come twice
dataset       one object to one row, and the rows of a data source with their hash
json_text     JSON text to values
jsonl, arrow  the formats: JSONL, of large files with rows read on access; Parquet and folders of Hugging Face datasets
order         which row comes next: shuffled epochs, joined and weighted sources
difficulty    which row comes next: by the weights of pools of the last mean rewards
source        prompt groups for training and for evaluation
eval_sets     the evaluation sets of the options
custom        a user's data source in its own process: batches, checks of its groups, state
"""
