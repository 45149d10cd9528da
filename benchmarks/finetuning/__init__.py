"""Parts of `finetune_gpu.py`: shapes of models, arms, one program for each side, and the meter."""
