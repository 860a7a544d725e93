// An exported ODE-ViT in Node: node predict.mjs MODEL.onnx PICTURE...
import { readFile } from 'node:fs/promises';
import ort from 'onnxruntime-node';
import sharp from 'sharp';
import { prepare, readConfig } from '../odevit.mjs';

const [model, ...pictures] = process.argv.slice(2);
const bytes = await readFile(model);
const config = readConfig(bytes);
const session = await ort.InferenceSession.create(bytes, { logSeverityLevel: 3 });

for (const picture of pictures) {
  const decoded = sharp(picture).rotate().flatten({ background: 'white' }).toColourspace('srgb').raw();
  const { data, info } = await decoded.toBuffer({ resolveWithObject: true });
  const values = prepare({ data, width: info.width, height: info.height }, config.preprocessing);
  const tensor = new ort.Tensor('float32', values, [1, ...config.preprocessing.input_size]);
  const answer = await session.run({ pixel_values: tensor });
  const logits = Array.from(answer.logits.data), best = logits.indexOf(Math.max(...logits));
  const full = config.integration.steps;  // a file of fixed depth has no output `steps`
  const steps = answer.steps ? Number(answer.steps.data[0]) : full;
  console.log(JSON.stringify({ picture, label: config.labels[best] ?? String(best), steps, of: full, logits }));
}
