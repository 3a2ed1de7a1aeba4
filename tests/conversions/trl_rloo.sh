export WANDB_PROJECT=rloo

accelerate launch --num_processes 4 --config_file zero2.yaml \
    examples/scripts/rloo.py \
    --model_name_or_path Qwen/Qwen2.5-3B \
    --dataset_name owner/math --reward_funcs accuracy_reward think_length \
    --learning_rate 1e-6 \
    --per_device_train_batch_size 8 --gradient_accumulation_steps 2 \
    --num_generations 4 --max_completion_length 512 \
    --normalize_advantages --reward_clip_range -1 1 \
    --use_peft --lora_r 8 --lora_target_modules q_proj v_proj \
    --max_steps 100 --output_dir=runs/rloo
