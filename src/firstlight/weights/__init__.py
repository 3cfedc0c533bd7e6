"""Read and write the weights of Hugging Face model folders without keeping a second copy of them in
memory.
"""
