// Decodes with llama.cpp through node-llama-cpp: plainly, or with prompt lookup.
// Speaks the protocol of protocol.py.
import {createRequire} from "node:module";
import path from "node:path";
import {pathToFileURL} from "node:url";
import readline from "node:readline";

const settings = JSON.parse(process.argv[2]);

function reply(content) {
    process.stdout.write(JSON.stringify(content) + "\n");
}

async function openEngine() {
    // The package lies in the folder of the environment, not beside this file.
    const {resolve} = createRequire(path.join(settings.packages, "package.json"));
    const entry = resolve("node-llama-cpp");
    const llamaCpp = await import(pathToFileURL(entry));
    const llama = await llamaCpp.getLlama({
        gpu: false, build: "never", logLevel: "error", maxThreads: settings.threads
    });
    const model = await llama.loadModel({modelPath: settings.model, gpuLayers: 0});
    // At fp32 the cache is as exact as the weights; below, llama.cpp's default holds.
    const exact = settings.precision === "fp32"
        ? {experimentalKvCacheKeyType: "F32", experimentalKvCacheValueType: "F32"}
        : {};
    const context = await model.createContext({
        contextSize: settings.max_length,
        threads: {ideal: settings.threads, min: settings.threads},
        ...exact
    });
    const options = {};
    if (settings.mode === "lookup")
        options.tokenPredictor = new llamaCpp.InputLookupTokenPredictor({
            patternLength: {min: 1, max: settings.lookup_ngram},
            predictionLength: {max: settings.lookup_tokens}
        });
    const sequence = context.getSequence(options);

    async function generate(ids, maxNewTokens) {
        await sequence.clearHistory();
        sequence.tokenPredictor?.updateInputTokens?.(ids);
        const begin = performance.now();
        let prefill = 0;
        const tokens = [];
        for await (const token of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true})) {
            tokens.push(token);
            if (tokens.length === 1)
                prefill = performance.now() - begin;
            if (tokens.length >= maxNewTokens || settings.end_ids.includes(token))
                break;
        }
        return {
            tokens,
            first: Math.min(1, tokens.length),
            prefill_seconds: prefill / 1000,
            seconds: (performance.now() - begin) / 1000
        };
    }

    const {release} = llama.llamaCppRelease;
    return {version: `node-llama-cpp ${settings.version}, llama.cpp ${release}`, generate};
}

try {
    const {version, generate} = await openEngine();
    reply({version});
    for await (const line of readline.createInterface({input: process.stdin})) {
        const job = JSON.parse(line);
        reply(await generate(job.ids, job.max_new_tokens));
    }
} catch (error) {
    console.error(error);
    reply({error: String(error)});
}
process.exit(0);
