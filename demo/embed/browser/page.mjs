import { prepare, readConfig, softmax, view } from '../odevit.mjs';

const DIST = new URL('../node_modules/onnxruntime-web/dist/', import.meta.url).href;
const DEVICES = { webgpu: 'WebGPU', wasm: 'WebAssembly' };
const MODEL = 'model.onnx';  // beside this page, for its examples
const REASONS = {
  0: 'stopped early: the score of the exit rule reached its threshold',
  1: 'Lyapunov time: the growth of perturbations toward the decision boundary reached its limit',
  3: 'depth budget: stopped at the number of steps allowed',
  4: 'full depth: integrated to the horizon',
};
const $ = (id) => document.getElementById(id);
let model = null, picture = null, shown = null;

/** `?device=webgpu` or `wasm`, else WebGPU where the browser has a GPU for it: an adapter in software is slower than WebAssembly. */
async function choose() {
  const asked = new URLSearchParams(location.search).get('device');
  if (asked in DEVICES) return asked;
  const adapter = await navigator.gpu?.requestAdapter().catch(() => null);
  return adapter && !adapter.info?.isFallbackAdapter ? 'webgpu' : 'wasm';
}

/** The model in the bytes of an exported file. */
export async function open(bytes) {
  const config = readConfig(bytes), device = await choose();
  try {
    return await start(bytes, config, device);
  } catch (error) {
    if (device === 'wasm') throw error;
    console.warn(`WebGPU could not be used: ${error.message ?? error}`);
    return start(bytes, config, 'wasm');
  }
}

async function start(bytes, config, device) {
  const ort = await import(`${DIST}ort.${device}.min.mjs`);
  ort.env.wasm.wasmPaths = DIST;
  ort.env.wasm.numThreads = 1;  // more need headers (COOP, COEP) that a plain file server does not send
  const executionProviders = device === 'webgpu' ? ['webgpu', 'wasm'] : ['wasm'];
  const session = await ort.InferenceSession.create(bytes, { executionProviders, logSeverityLevel: 3 });
  const model = { ort, config, session, device };
  const [, height, width] = config.preprocessing.input_size;
  await predict(model, { width, height, data: new Uint8ClampedArray(3 * width * height) });  // the first run compiles shaders
  return model;
}

/** The answer of a model for one decoded picture. */
export async function predict({ ort, config, session, device }, pixels) {
  const values = prepare(pixels, config.preprocessing), began = performance.now();
  const tensor = new ort.Tensor('float32', values, [1, ...config.preprocessing.input_size]);
  const found = await session.run({ pixel_values: tensor });
  const logits = Array.from(found.logits.data), full = config.integration.steps;
  const best = logits.indexOf(Math.max(...logits));
  return {
    logits, full, device, milliseconds: performance.now() - began,
    label: config.labels[best] ?? String(best),
    steps: found.steps ? Number(found.steps.data[0]) : full,  // a file of fixed depth has no such output
    reason: found.exit_reason ? REASONS[Number(found.exit_reason.data[0])] : 'a file of fixed depth',
    attention: found.cls_attention && { heads: found.cls_attention.dims[1], values: found.cls_attention.data },
  };
}

async function decode(file) {
  const bitmap = await createImageBitmap(file, { colorSpaceConversion: 'none' });
  const canvas = new OffscreenCanvas(bitmap.width, bitmap.height), brush = canvas.getContext('2d');
  brush.fillStyle = 'white';
  brush.fillRect(0, 0, bitmap.width, bitmap.height);
  brush.drawImage(bitmap, 0, 0);
  return { bitmap, ...{ width: bitmap.width, height: bitmap.height },
    data: brush.getImageData(0, 0, bitmap.width, bitmap.height).data };
}

async function update() {
  if (!model || !picture) return say(model ? 'Now a picture.' : picture ? 'Now an exported file.' : '');
  say('Working...');
  const answer = await predict(model, picture);
  shown = answer;
  const known = model.config.confidence, probabilities = softmax(answer.logits, known?.temperature ?? 1);
  const unsure = known?.unsure && Math.max(...probabilities) < known.unsure.threshold;
  $('label').textContent = unsure ? `${answer.label} (unsure)` : answer.label;
  const ranked = probabilities.map((p, i) => [p, model.config.labels[i] ?? String(i)]).sort((a, b) => b[0] - a[0]);
  $('top').replaceChildren(...ranked.slice(0, 5).map(([p, name]) => bar(name, p)));
  $('depth').textContent = `${answer.steps} of ${answer.full} steps; ${answer.reason}`;
  $('gauge').max = answer.full;
  $('gauge').value = answer.steps;
  $('time').textContent = `${answer.milliseconds.toFixed(1)} ms on ${DEVICES[answer.device]}`;
  $('heat-control').hidden = !answer.attention;
  $('answer').hidden = false;
  draw();
  say('');
}

function bar(name, probability) {
  const row = document.createElement('div'), [text, space, number] = ['span', 'span', 'span'].map((t) => document.createElement(t));
  row.className = 'bar';
  const fill = document.createElement('i');
  fill.style.width = `${100 * probability}%`;
  space.append(fill);
  text.textContent = name;
  number.textContent = `${(100 * probability).toFixed(1)}%`;
  row.append(text, space, number);
  return row;
}

/** The picture with the mean map of the heads laid over it. */
function draw() {
  const canvas = $('map'), brush = canvas.getContext('2d'), side = canvas.width;
  const squash = model.config.preprocessing.crop_mode === 'squash';
  const [left, top, length] = view(picture, model.config.preprocessing);
  const area = squash ? [0, 0, picture.width, picture.height] : [left, top, length, length];
  brush.globalAlpha = 1;
  brush.imageSmoothingQuality = 'high';
  brush.drawImage(picture.bitmap, ...area, 0, 0, side, side);
  if (!shown.attention) return;
  const { heads, values } = shown.attention, patches = values.length / heads, grid = Math.round(Math.sqrt(patches));
  const mean = Array.from({ length: patches }, (_, i) => {
    let sum = 0;
    for (let head = 0; head < heads; head++) sum += values[head * patches + i];
    return sum;
  });
  const low = Math.min(...mean), high = Math.max(...mean), heat = new ImageData(grid, grid);
  mean.forEach((value, i) => {
    const level = high > low ? (value - low) / (high - low) : 0;
    heat.data.set([60 + 195 * level, 20 + 180 * level ** 2, 90 * (1 - level), 90 + 165 * level], 4 * i);
  });
  const small = new OffscreenCanvas(grid, grid);
  small.getContext('2d').putImageData(heat, 0, 0);
  brush.globalAlpha = $('opacity').value / 100;
  brush.drawImage(small, 0, 0, side, side);
}

function say(text, wrong = false) {
  $('message').textContent = text;
  $('message').className = wrong ? 'wrong' : '';
}

const takers = {
  model: async (file) => { model = await open(new Uint8Array(await file.arrayBuffer())); },
  picture: async (file) => { picture = await decode(file); },
};

let queue = Promise.resolve();  // one after the other: a session runs one image at a time
function take(kind, file) {
  queue = queue.then(async () => {
    if (await read(kind, file)) await update();
  });
}

async function read(kind, file) {
  try {
    say(`Reading ${file.name}...`);
    await takers[kind](file);
    $(`${kind}-name`).textContent = file.name;
    return true;
  } catch (error) {
    const what = kind === 'model' ? 'an exported ODE-ViT' : 'a picture that this browser can read';
    say(`${file.name} is not ${what} (${error.message ?? error})`, true);
    return false;
  }
}

/** A picture of the page itself, by the model that was chosen, else by the one beside the page. */
function show(address) {
  queue = queue.then(async () => {
    try {
      if (!model && !await read('model', await get(MODEL))) return;
      if (await read('picture', await get(address))) await update();
    } catch (error) {
      say(error.message, true);
    }
  });
}

async function get(address) {
  const name = address.split('/').pop();
  say(`Fetching ${name}...`);
  const answer = await fetch(address);
  const hint = name === MODEL ? `: odevit-serve export --format onnx-adaptive -o demo/embed/browser/${MODEL}` : '';
  if (!answer.ok) throw new Error(`There is no ${name} beside this page${hint}`);
  return new File([await answer.blob()], name);
}

for (const button of document.querySelectorAll('#examples button')) {
  button.addEventListener('click', () => show(button.querySelector('img').getAttribute('src')));
}

for (const kind of Object.keys(takers)) {
  const zone = $(`${kind}-drop`);
  $(kind).addEventListener('change', (event) => event.target.files[0] && take(kind, event.target.files[0]));
  for (const [name, over] of [['dragover', true], ['dragleave', false], ['drop', false]]) {
    zone.addEventListener(name, (event) => {
      event.preventDefault();
      zone.classList.toggle('over', over);
      if (name === 'drop' && event.dataTransfer.files[0]) take(kind, event.dataTransfer.files[0]);
    });
  }
}
$('opacity').addEventListener('input', draw);
window.answer = () => shown;  // for whoever drives the page
update();
