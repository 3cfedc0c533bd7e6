"""Read and write the weights of Hugging Face model folders without a second copy in memory."""
