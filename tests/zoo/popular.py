"""Well-known types, most of them without a hand plan."""

POPULAR = """
gpt2 bert roberta xlm-roberta distilbert electra deberta deberta-v2 albert t5 mt5 umt5 longt5 bart mbart pegasus marian
blenderbot blenderbot-small m2m_100 led bigbird_pegasus big_bird longformer opt bloom falcon mpt gpt_bigcode gpt_neo
openai-gpt xglm ctrl biogpt codegen persimmon stablelm fuyu dbrx mamba mamba2 falcon_mamba rwkv recurrent_gemma xlnet
xlm xlm-roberta-xl camembert mpnet funnel fnet nystromformer squeezebert mobilebert convbert layoutlm layoutlmv3 bros
markuplm roformer rembert ernie modernbert modernbert-decoder nomic_bert esm tapas roc_bert data2vec-text megatron-bert
mra yoso splinter luke prophetnet switch_transformers nllb-moe plbart fsmt bert-generation vit deit beit dinov2
dinov3_vit dinov2_with_registers swin swinv2 convnext convnextv2 resnet segformer mobilevit mobilenet_v2 regnet
efficientnet poolformer pvt levit cvt vit_mae vit_msn vivit timesformer videomae ijepa hiera clip siglip siglip2
chinese_clip clipseg altclip align groupvit blip blip-2 git llava llava_next paligemma idefics2 idefics3 smolvlm
internvl vilt flava owlvit detr conditional_detr deformable_detr rt_detr yolos mask2former maskformer oneformer dpt
depth_anything glpn sam vitmatte vitdet trocr donut-swin vision-encoder-decoder whisper wav2vec2 hubert wavlm
data2vec-audio speech_to_text wav2vec2-conformer wav2vec2-bert speecht5 vits musicgen encodec seamless_m4t clap
audio-spectrogram-transformer time_series_transformer patchtst informer autoformer decision_transformer moshi perceiver
kosmos-2 pix2struct qwen2_audio aya_vision bitnet olmo glm4v zamba zamba2 moonshine csm dia gemma3 mistral3 got_ocr2
udop vjepa2 aimv2 lilt nemotron
""".split()
